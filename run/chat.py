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
"""
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from core.config import need
from run.cli import note
from run.texts import BOOKKEEPING, Conversation

CHATML = ("{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
CHATML_MARKERS = "<|im_start|>", "<|im_end|>"
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # by which transformers finds them
LINKS = BOOKKEEPING | {"tool_call_id"}  # keys of messages that say nothing which a model would read
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
        from transformers import PreTrainedTokenizerFast
        self.tokenizer, self.template = None, CHATML
        if tokenizer_path:
            try:
                self.tokenizer = PreTrainedTokenizerFast.from_pretrained(Path(tokenizer_path).parent,
                                                                         local_files_only=True)
            except Exception as error:  # of damaged files the library raises anything
                line = f"{tokenizer_path}: its chat template cannot be read: {error}".splitlines()[0]
                raise ValueError(line) from None
            if self.tokenizer.chat_template:
                self.template = None  # which of its templates is used depends on the tools
                self.note_unknown_markers(tokenizer_path)
            else:
                missing = [marker for marker in CHATML_MARKERS if marker not in self.tokenizer.get_vocab()]
                need(not missing, f"{tokenizer_path}: has no token {' and no token '.join(missing)}, and no chat "
                                  "template lies beside it: put the model's chat_template.jinja or "
                                  "tokenizer_config.json there, or use a tokenizer with these tokens")
        self.probed: dict[str, tuple[bool, str]] = {}
        self.noted: set[str] = set()  # keys of messages that the template does not use, and that may be left out

    def note_unknown_markers(self, tokenizer_path: str) -> None:
        """Say which markers of the published template are no tokens, as of a template that is another model's."""
        templates = self.tokenizer.chat_template
        templates = templates.values() if isinstance(templates, dict) else [templates]
        written = set(re.findall(r"<\|[^|<>{}\s]+\|>", " ".join(templates)))
        if unknown := sorted(written - self.tokenizer.get_vocab().keys()):
            note(f"{tokenizer_path}: has no token {', '.join(unknown)}, which the chat template writes: a model learns "
                 "their pieces")

    # ---- what a conversation becomes

    def documents(self, conversation: Conversation) -> list[Rendered]:
        """Return the documents of a conversation. Raises ValueError if the template fails, or ignores a key."""
        try:
            written = self.write(conversation)
            self.check_all_is_used(conversation, written)
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

        The prompt of some templates begins a thought, which answers lack: then where the text stops to be that prompt.
        If the prompt is unknown, or the messages before it are written in another way, where other answers would
        differ.
        """
        if before:
            history = self.render(before, variables)
            prompted = self.render(before, variables, add_generation_prompt=True)
            same = len(os.path.commonprefix((prompted, after)))
            if same >= min(len(history), len(prompted)):
                return same
        elif prompt and prompt in after:
            return after.index(prompt) + len(prompt)
        others = [self.render([*before, dict(role="assistant", content=answer)], variables) for answer in PROBES]
        return min(len(os.path.commonprefix((other, after))) for other in others)

    def write_with_marks(self, conversation: Conversation) -> Rendered:
        from transformers.utils.chat_template_utils import render_jinja_template
        variables, weights = dict(conversation.variables), conversation.weights
        named = dict(self.tokenizer.special_tokens_map) | variables
        texts, marks = render_jinja_template([conversation.messages], chat_template=self.source(variables),
                                             return_assistant_tokens_mask=True, **named)
        answers = [weight for message, weight in zip(conversation.messages, weights) if message["role"] == "assistant"]
        need(len(marks[0]) == len(answers) or 0 not in answers, "the chat template marks "
             f"{len(marks[0])} answers of {len(answers)}, so that nobody can tell which weight is of which")
        kept = [Span(start, stop) for i, (start, stop) in enumerate(marks[0])
                if len(marks[0]) != len(answers) or answers[i] != 0]
        return Rendered(texts[0], kept)

    def check_all_is_used(self, conversation: Conversation, written: list[Rendered]) -> None:
        """Raise ValueError for a key of a record or of a message that changes no document."""
        source = self.source(conversation.variables)
        for key in conversation.variables:
            need(re.search(rf"\b{re.escape(key)}\b", source), f"the chat template does not use its key {key}")
        keys = {(message["role"], key) for message in conversation.messages for key in message.keys() - {
            "role", "content"} if message[key] not in ("", [], {})}
        for role, key in sorted(keys):
            if key in self.noted:
                continue
            messages = [{name: value for name, value in message.items() if (message["role"], name) != (role, key)}
                        for message in conversation.messages]
            try:
                is_used = self.write(Conversation(messages, conversation.weights, conversation.variables)) != written
            except Exception:  # the template needs the key
                is_used = True
            if not is_used and key in LINKS:
                note(f"{conversation.where}: the chat template does not use the key {key} of messages (said once)")
                self.noted.add(key)
                continue
            need(is_used, f"the chat template does not use the key {key} of a message of the role {role}: take it out, "
                          f"or leave it out by `tokenize --ignore {key}`")

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
