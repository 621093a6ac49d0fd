"""Conversations as text, by the chat template that is published beside a tokenizer, and which of it is learned.

    messages     user: 2 + 2?                 assistant: It is 4.
    text         <|im_start|>user\\n2 + 2?<|im_end|>\\n<|im_start|>assistant\\nIt is 4.<|im_end|>\\n
    span                                                                ^^^^^^^^^^^^^^^^^^^^^^

What an assistant says, and its end, are the targets. If a template has `{% generation %}` marks, the marks say which
text that is. If not, we write each answer as a model would generate it. Before it comes the conversation so far, with
the prompt for an answer; the span is the text that the template adds when the answer is there.

Some templates write an answer in another way once more messages follow: Qwen 3's leaves the thoughts out. Then the text
as generated is no beginning of the whole text, and the answer is a document of its own, with all that precedes it.
Answers whose texts continue each other are in one document.

Some templates write no end of an answer: the next message's marker is the end. Then the first token of this marker is
a target, too. After the last message it is the tokenizer's end of a text. Without this target a model would not learn
to stop. If no template is published, the text is ChatML, as above.

Arguments of a tool's call are objects for most templates, which write them as JSON, and text for some. Data has either,
so we try objects first and text if the template fails.
"""
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from core.config import need
from run import huggingface
from run.cli import note
from run.texts import BOOKKEEPING, Conversation

CHATML = ("{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
CHATML_MARKERS = "<|im_start|>", "<|im_end|>"
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # by which transformers finds them
LINKS = BOOKKEEPING | {"tool_call_id"}  # keys of messages that say nothing which a model would read
OLD_TEMPLATE = "chat_template.json"  # as transformers once wrote it beside a processor
PROBES = "Zq7Xk", "8jWv"  # answers that no template changes, and that begin differently


class Span(NamedTuple):
    """Characters start .. stop of a text, which are targets. ends: whether they contain the end of the answer. If they
    do not, the token after them is a target, too."""
    start: int
    stop: int
    ends: bool = True


class Rendered(NamedTuple):
    text: str
    spans: list[Span]


class Template:
    """The chat template beside a tokenizer, or ChatML if there is none. tokenizer_path: "" for ChatML in bytes.

    Raises ValueError if the tokenizer lacks ChatML's markers: pieces of a marker would be learned as text.
    """

    def __init__(self, tokenizer_path: str):
        self.tokenizer, self.template, self.path = None, CHATML, tokenizer_path
        self.foreign: set[str] = set()  # tokens that other files add to those of the tokenizer.json
        if tokenizer_path:
            self.read_published()
        self.probed: dict[str, tuple[bool, str]] = {}
        self.noted: set[str] = set()  # what has been said once
        self.checked: set[str] = set()  # roles of which a content was looked for by words of ours
        self.changed: set[str] = set()  # roles whose contents are in no text letter by letter

    def read_published(self) -> None:
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast
        old = Path(self.path).with_name(OLD_TEMPLATE)
        try:
            own = set(Tokenizer.from_file(self.path).get_vocab())
            if huggingface.owns_folder(Path(self.path)):
                self.tokenizer = PreTrainedTokenizerFast.from_pretrained(old.parent, local_files_only=True,
                                                                         tokenizer_file=self.path)
                if not self.tokenizer.chat_template and old.is_file():
                    self.tokenizer.chat_template = json.loads(old.read_text(encoding="utf-8"))["chat_template"]
            else:
                self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=self.path)
        except Exception as error:  # of damaged files the library raises anything
            raise ValueError(f"{self.path}: its chat template cannot be read: {error}".splitlines()[0]) from None
        self.foreign = self.tokenizer.get_vocab().keys() - own
        if self.tokenizer.chat_template:
            self.template = None  # which of its templates is used depends on the tools
            self.note_what_it_writes(own)
            return
        missing = [marker for marker in CHATML_MARKERS if marker not in own]
        need(not missing, f"{self.path}: has no token {' and no token '.join(missing)}, and no chat template lies "
                          "beside it: put the model's chat_template.jinja or tokenizer_config.json there, or use a "
                          "tokenizer with these tokens")
        note(f"{self.path}: no chat template lies beside it, so conversations are written as ChatML")

    def note_what_it_writes(self, own: set[str]) -> None:
        """Say which markers of the published template are no tokens, as of a template that is another model's, and that
        it writes the date, by which the same data is another text tomorrow."""
        templates = self.tokenizer.chat_template
        templates = " ".join(templates.values() if isinstance(templates, dict) else [templates])
        if unknown := sorted(set(re.findall(r"<\|[^|<>{}\s]+\|>", templates)) - own - self.foreign):
            note(f"{self.path}: has no token {', '.join(unknown)}, which the chat template writes: a model learns "
                 "their pieces")
        if "strftime_now" in templates:
            variable = " if date_string is not in chat_template_kwargs" * ("date_string" in templates)
            note(f"{self.path}: the chat template writes today's date{variable}")

    def say_once(self, what: str, line: str) -> None:
        if what not in self.noted:
            note(f"{line} (said once)")
            self.noted.add(what)

    # ---- what a conversation becomes

    def documents(self, conversation: Conversation) -> list[Rendered]:
        """Return the documents of a conversation. Raises ValueError if the template fails, or ignores a key."""
        try:
            try:
                used = with_arguments(conversation, arguments_as_object)
                written = self.write(used)
            except Exception:
                as_text = with_arguments(conversation, arguments_as_text)
                if as_text == used:
                    raise
                used, written = as_text, self.write(as_text)
            self.check_all_is_used(used, written)
            text = "".join(document.text for document in written)
            for token in self.foreign:
                need(token not in text, f"{token} is a token of tokenizer_config.json or added_tokens.json, but not of "
                                        f"{self.path}: write all of them by save_pretrained of transformers")
        except Exception as error:  # what strangers' templates lead to
            raise ValueError(f"{conversation.where}: is no conversation: {type(error).__name__}: "
                             f"{error}".splitlines()[0]) from None
        return written

    def write(self, conversation: Conversation) -> list[Rendered]:
        messages, variables = conversation.messages, conversation.variables
        if MARKS.search(self.source(variables)):
            return [self.write_with_marks(conversation)]
        ends, prompt = self.probe(variables)
        whole, written = self.render(messages, variables), []
        for i, (message, weight) in enumerate(zip(messages, conversation.weights)):
            if message["role"] != "assistant":
                continue
            after = self.render(messages[:i + 1], variables)
            span = Span(self.start_of_answer(messages[:i], after, prompt, variables), len(after), ends)
            if written and after.startswith(written[-1].text):
                spans = written.pop().spans
            else:
                spans = []
            written.append(Rendered(after, [*spans, *([span] if weight != 0 else [])]))
        if not written:
            return [Rendered(whole, [])]
        if whole.startswith(written[-1].text):
            written[-1] = Rendered(whole, written[-1].spans)
        return [document for document in written if document.spans] or written[-1:]

    def start_of_answer(self, before: list[dict], after: str, prompt: str, variables: dict[str, Any]) -> int:
        """Where in the text `after` the answer begins that follows the messages `before`: where the prompt for it ends.

        The prompt of some templates begins a thought, which answers lack: then where the text stops to be that prompt,
        or earlier, where other answers would differ: <tool_call> begins as <think> does. If the prompt is unknown, or
        the messages before it are written in another way, it is where other answers would differ.
        """
        same = len(after)
        if before:
            history = self.render(before, variables)
            prompted = self.render(before, variables, add_generation_prompt=True)
            common = len(os.path.commonprefix((prompted, after)))
            if common == len(prompted):
                return common
            if common >= len(history):
                same = common
        elif prompt and prompt in after:
            return after.index(prompt) + len(prompt)
        others = [self.render([*before, dict(role="assistant", content=answer)], variables) for answer in PROBES]
        return min(same, *(len(os.path.commonprefix((other, after))) for other in others))

    def write_with_marks(self, conversation: Conversation) -> Rendered:
        from transformers.utils.chat_template_utils import render_jinja_template
        variables, weights = dict(conversation.variables), conversation.weights
        named = dict(self.tokenizer.special_tokens_map) | variables
        texts, marks = render_jinja_template([conversation.messages], chat_template=self.source(variables),
                                             return_assistant_tokens_mask=True, **named)
        answers = [weight for message, weight in zip(conversation.messages, weights) if message["role"] == "assistant"]
        need(len(marks[0]) == len(answers) or 0 not in answers, "the chat template marks "
             f"{len(marks[0])} answers of {len(answers)}, so that nobody can tell which weight is of which")
        rest = texts[0][marks[0][-1][1]:].strip() if marks[0] else ""
        if rest and conversation.messages[-1]["role"] == "assistant":
            self.say_once("rest", f"{conversation.where}: the chat template writes {rest} after an answer, outside of "
                          "its generation marks, so a model does not learn to write it")
        kept = [Span(start, stop) for i, (start, stop) in enumerate(marks[0])
                if len(marks[0]) != len(answers) or answers[i] != 0]
        return Rendered(texts[0], kept)

    def check_all_is_used(self, conversation: Conversation, written: list[Rendered]) -> None:
        """Raise ValueError for a key of a record or of a message, or for a content, that changes no document."""
        self.check_contents(conversation, written)
        source = self.source(conversation.variables)
        for key in conversation.variables:
            need(re.search(rf"\b{re.escape(key)}\b", source), f"the chat template does not use its key {key}")
        keys = {(message["role"], key) for message in conversation.messages for key in message.keys() - {
            "role", "content"} if message[key] not in ("", [], {})}
        whole = self.render(conversation.messages, conversation.variables) if keys else ""
        for role, key in sorted(keys):
            if key in self.noted:
                continue
            messages = [{name: value for name, value in message.items() if (message["role"], name) != (role, key)}
                        for message in conversation.messages]
            try:
                is_used = (self.render(messages, conversation.variables) != whole  # mostly, and quickly
                           or self.write(replace(conversation, messages=messages)) != written)
            except Exception:  # the template needs the key
                is_used = True
            if not is_used and key in LINKS:
                self.say_once(key, f"{conversation.where}: the chat template does not use the key {key} of messages")
                continue
            need(is_used, f"the chat template does not use the key {key} of a message of the role {role}: take it out, "
                          f"or leave it out by `tokenize --ignore {key}`")

    def check_contents(self, conversation: Conversation, written: list[Rendered]) -> None:
        """Raise ValueError for a message, up to the last answer that is learned, whose content is in no document. Say
        once if only a part of one is.

        A content that is in no document, spaces aside, may have been changed, for example into JSON. Then we put a word
        at its beginning and one at its end, and look for the words. So we do with the first message of each role: a
        short content may be anywhere by chance.
        """
        texts, messages = ["".join(document.text.split()) for document in written], conversation.messages
        learned = [i for i, (message, weight) in enumerate(zip(messages, conversation.weights))
                   if message["role"] == "assistant" and weight != 0]
        for i, message in enumerate(messages[:max(learned, default=-1) + 1]):
            role, content = message["role"], (message.get("content") or "").strip()
            is_there = any("".join(content.split()) in text for text in texts)
            if content == "" or (role == "assistant" and i not in learned) or role in self.changed or (
                    role in self.checked and is_there):
                continue
            self.checked.add(role)
            if not is_there:
                self.changed.add(role)  # to look for each of them would render all messages as often as there are some
            changed = message | dict(content=f"{PROBES[0]} {content} {PROBES[1]}")
            try:
                new = self.write(replace(conversation, messages=[*messages[:i], changed, *messages[i + 1:]]))
            except Exception:  # the template reads the content, and wants another one
                continue
            found = [any(word in document.text for document in new) for word in PROBES]
            need(any(found), f"the chat template does not use the content of a message of the role {role}, which is "
                             f"number {i + 1}: take the message out")
            if not all(found) and not is_there:
                self.say_once(f"content of {role}", f"{conversation.where}: the chat template leaves out a part of a "
                              f"message of the role {role}, such as thoughts, so a model does not learn it")

    # ---- the template

    def begins_with(self, separator: str) -> bool:
        """Whether the template writes the separator of documents before a conversation."""
        try:
            return self.render([dict(role="user", content="Hi")], {}).startswith(separator)
        except Exception:  # what strangers' templates lead to
            return False

    def render(self, messages: list[dict], variables: dict[str, Any], add_generation_prompt: bool = False) -> str:
        if self.tokenizer:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, chat_template=self.template,
                                                      add_generation_prompt=add_generation_prompt, **variables)
        from transformers.utils.chat_template_utils import render_jinja_template
        return render_jinja_template([messages], chat_template=CHATML, add_generation_prompt=add_generation_prompt,
                                     **variables)[0][0]

    def end_of_answer(self) -> tuple[str, bool]:
        """(the marker that ends an answer, True), or, of a template that writes none, (the text up to the next message,
        False). The text is "" if the template refuses a short conversation."""
        asked, answered = dict(role="user", content="Hi"), dict(role="assistant", content=PROBES[0])
        ends, _ = self.probe({})
        try:
            text = self.render([asked, answered] if ends else [asked, answered, asked], {})
            after = text[text.rindex(PROBES[0]) + len(PROBES[0]):]
        except Exception:  # what strangers' templates lead to
            return "", True
        return (re.match(r"<[^<>\s]+>|\S*", after.lstrip())[0], True) if ends else (after, False)

    def source(self, variables: dict[str, Any]) -> str:
        """The template that these variables choose: there may be one for tools."""
        if self.template:
            return self.template
        return self.tokenizer.get_chat_template(None, variables.get("tools"))

    def probe(self, variables: dict[str, Any]) -> tuple[bool, str]:
        """(whether the template writes something after an answer, which is its end; the prompt for an answer).

        We ask with a short conversation. If the template refuses it, we assume that it has an end and no prompt.
        """
        source = self.source(variables)
        if source not in self.probed:
            asked, answered = dict(role="user", content="Hi"), dict(role="assistant", content=PROBES[0])
            try:
                text = self.render([asked, answered], {})
                ends = text[text.rindex(PROBES[0]) + len(PROBES[0]):].strip() != ""
                history, prompted = (self.render([asked], {}, add_generation_prompt=asks) for asks in (False, True))
                prompt = prompted.removeprefix(history) if prompted.startswith(history) else ""
            except Exception:
                ends, prompt = True, ""
            self.probed[source] = ends, prompt
        return self.probed[source]


# ---- arguments of calls ---------------------------------------------------------------------------------------------

def with_arguments(conversation: Conversation, form: Callable[[Any], Any]) -> Conversation:
    """The conversation with the arguments of all calls in this form."""
    def formed(call: Any) -> Any:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            return call
        function = function | dict(arguments=form(function["arguments"]))
        return call | dict(function=function) if "function" in call else function
    messages = [message | dict(tool_calls=list(map(formed, message["tool_calls"])))
                if isinstance(message.get("tool_calls"), list) else message for message in conversation.messages]
    return replace(conversation, messages=messages)


def arguments_as_object(arguments: Any) -> Any:
    """The object that a text of JSON holds; anything else as it is."""
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


def arguments_as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
