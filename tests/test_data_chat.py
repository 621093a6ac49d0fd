"""Conversations as chat templates write them: transformers' rendering is the judge of text and of what is learned.

TEMPLATES follow published ones; each is short for what matters here: how a turn begins and ends, what is left out
of earlier turns, what else of a message or a record is read.
"""
import json
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import transformers

from run import tokenizing
from run.data import Corpus, Samples

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>",
           "<|eot|>", "<s>", "</s>", "[INST]", "[/INST]", "<think>", "</think>", "<tool_call>", "</tool_call>"]
CHATML = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>{{ '\n' }}"
    "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ ' ' + m.name if m.name }}{{ '\n' + (m.content or '') }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
TEMPLATES = {
    "qwen 2": (CHATML, True),
    # Thoughts of turns before the last question are left out; the last turn has some, if empty ones.
    "qwen 3": (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role + '\n' }}"
        "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
        "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{% endif %}", True),
    # An answer ends where the next marker is.
    "glm 4": (
        "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}", False),
    "plain": (
        "{% for m in messages %}{{ '\n\n' if not loop.first }}### {{ m.role }}:\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\n\n' }}### assistant:\n{% endif %}", False),
    "llama 2": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]{% else %} "
        "{{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}", True),
    # Its separator is the end of each turn, too.
    "separator inside": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}", True),
    # The end is written after the last answer alone.
    "end at the end": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{% if loop.last and m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}", True),
}
CONVERSATIONS = {
    "one turn": [("user", "2 + 2?"), ("assistant", "It is 4.")],
    "three turns": [("user", "a?"), ("assistant", "Café 你好."), ("user", "b\n?"), ("assistant", "x\n\ny"),
                    ("user", "c"), ("assistant", "z")],
    "a system prompt, and a question at the end": [("system", "Be brief."), ("user", "a"), ("assistant", "b"),
                                                   ("user", "c")],
    "the separator in a content": [("user", "What is <|endoftext|>?"), ("assistant", "It is <|endoftext|>."),
                                   ("user", "And?"), ("assistant", "Yes.")],
}


@pytest.fixture
def folder(tmp_path) -> Path:
    """With a tokenizer by bytes, and what is published beside it."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator([], tokenizers.trainers.BpeTrainer(
        special_tokens=CONTROL, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def publish(folder: Path, template: str) -> transformers.PreTrainedTokenizerFast:
    settings = dict(chat_template=template, bos_token="<s>", eos_token="</s>")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def learned(folder: Path, *records, ignored=()) -> list[tuple[str, list[tuple[str, str]]]]:
    """What `tokenize` makes of records: for each document its text, and (all before, what is learned) for each run of
    targets."""
    lines, out = folder / "chat.jsonl", folder / "out" / "tokens.bin"
    lines.write_text("".join(json.dumps(record) + "\n" for record in records))
    count, _ = tokenizing.tokenize([str(lines)], str(folder / "tokenizer.json"), str(out), ignored=ignored)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def text(tokens) -> str:
        return tokenizer.decode(list(tokens), skip_special_tokens=False)
    tokens, begins, targets = Corpus([str(out)], 400).read(0, count)
    found = []
    for start, stop in zip(np.flatnonzero(begins), [*np.flatnonzero(begins)[1:], count]):
        ids, is_target = tokens[start:stop], targets[start:stop]
        edges = np.flatnonzero(np.diff(np.concatenate(([0], is_target, [0]))))
        runs = [(text(ids[:a]), text(ids[a:b])) for a, b in zip(edges[::2], edges[1::2])]
        found.append((text(ids), runs))
    return found


def as_generated(tokenizer, messages: list[dict], writes_end: bool, **variables) -> list[tuple[str, str]]:
    """By transformers: for each answer what precedes it, and what a model has to write."""
    wanted, render = [], lambda given, **more: tokenizer.apply_chat_template(given, tokenize=False, **variables, **more)
    whole = render(messages)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = render(messages[:i], add_generation_prompt=True), render(messages[:i + 1])
            end = ""
            if not writes_end:
                assert whole.startswith(after)
                rest = re.match(r"\s*(<\|\w+\|>|#|$)", whole[len(after):])
                end = rest[0] if i + 1 < len(messages) else "</s>"
            assert after.startswith(before)
            wanted.append((before, after[len(before):] + end))
    return wanted


@pytest.mark.parametrize("turns", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("template, writes_end", TEMPLATES.values(), ids=TEMPLATES)
def test_each_answer_is_learned_as_it_would_be_generated(folder, template, writes_end, turns):
    """With its end; and each document begins at its beginning, however often a template writes the separator."""
    messages = [dict(role=role, content=content) for role, content in turns]
    if "[INST]" in template and messages[0]["role"] == "system":
        messages = messages[1:]
    wanted = as_generated(publish(folder, template), messages, writes_end)
    documents = learned(folder, dict(messages=messages), dict(messages=messages))
    got = [(before.removeprefix("<|endoftext|>"), answer) for _, runs in documents for before, answer in runs]
    assert got == wanted * 2
    assert all(text.startswith("<|endoftext|>") for text, _ in documents)


def test_an_answer_sees_its_question_when_documents_are_masked(folder):
    """Though the template has the separator between them."""
    publish(folder, TEMPLATES["separator inside"][0])
    turns = [dict(role=role, content=content) for role, content in CONVERSATIONS["three turns"]]
    documents = learned(folder, dict(messages=turns), dict(messages=turns))
    corpus = Corpus([str(folder / "out" / "tokens.bin")], 400)
    batch = Samples(corpus, len(corpus) - 1, None, mask_documents=True).micro_batch([0])
    half = len(corpus) // 2
    assert len(documents) == 2 and batch.documents[0].tolist() == [1] * half + [2] * (half - 1)
    assert batch.positions[0].tolist() == [*range(half), *range(half - 1)]


def test_generation_marks_are_the_targets_of_transformers(folder):
    """Also in a template that leaves earlier thoughts out, of which each answer else is a document of its own."""
    template = ("{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
                "{{ '<think>' if loop.last }}{{ m.content }}<|eot|>{% endgeneration %}{% else %}{{ m.content }}"
                "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
    tokenizer = publish(folder, template)
    messages = [dict(role=role, content=content) for role, content in CONVERSATIONS["three turns"]]
    want = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    learned(folder, dict(messages=messages))
    tokens, _, targets = Corpus([str(folder / "out" / "tokens.bin")], 400).read(0, len(want["input_ids"]) + 1)
    assert tokens.tolist()[1:] == want["input_ids"]
    assert targets.tolist()[1:] == [value == 1 for value in want["assistant_masks"]]


TOOLS = [dict(type="function", function=dict(name="add", description="a + b", parameters={}))]
CALL = [dict(type="function", function=dict(name="add", arguments=dict(a=2, b=2)))]
RICH = [
    ("qwen 2", [dict(role="user", content="2 + 2?", name="Ada"), dict(role="assistant", content="", tool_calls=CALL),
                dict(role="tool", content="4", name="add"), dict(role="assistant", content="It is 4.")],
     dict(tools=TOOLS)),
    ("qwen 2", [dict(role="user", content="2 + 2?"), dict(role="assistant", content=None, tool_calls=CALL)],
     dict(tools=json.dumps(TOOLS))),
    ("qwen 3", [dict(role="user", content="2 + 2?"), dict(role="assistant", content="4", reasoning_content="easy"),
                dict(role="user", content="3 + 3?"), dict(role="assistant", content="6", reasoning_content="too")],
     {}),
    ("qwen 3", [dict(role="user", content="2 + 2?"), dict(role="assistant", content="4")],
     dict(chat_template_kwargs=dict(enable_thinking=False))),
    ("qwen 2", [dict(role="user", content="a", name=None), dict(role="assistant", content="b", tool_calls=None)],
     dict(tools=None, system=None)),
    ("qwen 2", [dict(role="user", content=[dict(type="text", text="a"), dict(type="text", text="b")]),
                dict(role="assistant", content="c")], {}),
]


@pytest.mark.parametrize("name, messages, more", RICH)
def test_all_that_a_record_says_goes_to_the_template(folder, name, messages, more):
    template, writes_end = TEMPLATES[name]
    variables = {key: json.loads(value) if isinstance(value, str) else value for key, value in more.items() if value}
    variables |= variables.pop("chat_template_kwargs", {})
    plain = [message | dict(content="".join(part["text"] for part in message["content"]))
             if isinstance(message["content"], list) else message for message in messages]
    wanted = as_generated(publish(folder, template), plain, writes_end, **variables)
    documents = learned(folder, dict(messages=messages, **more))
    got = [(before.removeprefix("<|endoftext|>"), answer) for _, runs in documents for before, answer in runs]
    assert got == wanted


@pytest.mark.parametrize("record, key", [
    (dict(tools=TOOLS), "tools"), (dict(mood="good"), "mood"), (dict(label=False), "label"),
    (dict(chat_template_kwargs=dict(enable_thinking=False)), "enable_thinking"),
    (dict(message=dict(tool_calls=CALL)), "tool_calls of a message of the role assistant"),
    (dict(message=dict(reasoning_content="hm")), "reasoning_content of a message of the role assistant"),
    (dict(message=dict(mood="good")), "mood of a message of the role assistant")])
def test_a_key_that_nothing_uses_is_refused_by_name(folder, record, key):
    publish(folder, TEMPLATES["glm 4"][0])
    last = dict(role="assistant", content="b") | record.pop("message", {})
    asked = dict(messages=[dict(role="user", content="a"), last], **record)
    with pytest.raises(ValueError, match=rf"chat.jsonl: line 1: [^\n]* (its|the) key {key}"):
        learned(folder, asked)
    name = key.split()[0]
    if name not in ("enable_thinking", "tools"):
        assert learned(folder, asked, ignored=[name]) == learned(folder, dict(messages=[asked["messages"][0], dict(
            role="assistant", content="b")]))


@pytest.mark.parametrize("key, off, on", [("weight", 0, 1), ("train", False, True), ("training", False, True),
                                          ("loss", 0.0, 1.0)])
def test_weights_of_messages_choose_the_answers_that_are_learned(folder, key, off, on):
    tokenizer = publish(folder, CHATML)
    turns = CONVERSATIONS["three turns"]
    for chosen in ([1], [0, 2], [0, 1, 2]):
        messages = [dict(role=role, content=content) for role, content in turns]
        wanted = [as_generated(tokenizer, messages, True)[i] for i in chosen]
        for i in range(3):
            messages[2 * i + 1][key] = on if i in chosen else off
        (text, runs), = learned(folder, dict(messages=messages))
        assert [(before.removeprefix("<|endoftext|>"), answer) for before, answer in runs] == wanted
    for role, value, says in (("assistant", 0.5, "must be 0 or 1"), ("user", on, "only what an assistant says")):
        with pytest.raises(ValueError, match=says):
            message = {"role": role, "content": "b", key: value}
            learned(folder, dict(messages=[dict(role="assistant", content="a"), message]))


SHAPES = {
    "messages": dict(messages=[dict(role="user", content="2 + 2?"), dict(role="assistant", content="4")]),
    "a bare array": [dict(role="user", content="2 + 2?"), dict(role="assistant", content="4")],
    "sharegpt": dict(conversations=[{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]),
    "sharegpt with roles": dict(conversations=[dict(role="user", content="2 + 2?"),
                                               dict(role="assistant", content="4")]),
    "prompt and completion": dict(prompt="2 + 2?", completion="4"),
    "messages to complete": dict(prompt=[dict(role="user", content="2 + 2?")],
                                 completion=[dict(role="assistant", content="4")]),
    "alpaca": dict(instruction="2 + 2?", input="", output="4"),
    "alpaca without input": dict(instruction="2 + 2?", output="4"),
    "bookkeeping": dict(messages=[dict(role="user", content="2 + 2?"), dict(role="assistant", content="4")], id=3,
                        source="web"),
}


@pytest.mark.parametrize("record", SHAPES.values(), ids=SHAPES)
def test_each_shape_of_a_record_is_the_same_conversation(folder, record):
    wanted = as_generated(publish(folder, CHATML), SHAPES["a bare array"], True)
    (_, runs), = learned(folder, record)
    assert [(before.removeprefix("<|endoftext|>"), answer) for before, answer in runs] == wanted


def test_a_system_prompt_and_an_input_are_part_of_what_is_asked(folder):
    tokenizer = publish(folder, CHATML)
    for record, asked in ((dict(instruction="Add.", input="2, 2", output="4"), [("user", "Add.\n2, 2")]),
                          (dict(instruction="Add.", output="4", system="Be brief."), [("system", "Be brief."),
                                                                                     ("user", "Add.")]),
                          (dict(conversations=[{"from": "human", "value": "Add."}, {"from": "gpt", "value": "4"}],
                                system="Be brief."), [("system", "Be brief."), ("user", "Add.")])):
        messages = [dict(role=role, content=content) for role, content in (*asked, ("assistant", "4"))]
        (_, runs), = learned(folder, record)
        wanted = as_generated(tokenizer, messages, True)
        assert [(before.removeprefix("<|endoftext|>"), answer) for before, answer in runs] == wanted


@pytest.mark.parametrize("template", [CHATML, TEMPLATES["qwen 3"][0], TEMPLATES["glm 4"][0]], ids=["qwen 2", "qwen 3",
                                                                                                  "glm 4"])
def test_a_conversation_may_begin_with_the_assistant(folder, template):
    messages = [dict(role=role, content=content) for role, content in (
        ("assistant", "Hello!"), ("user", "2 + 2?"), ("assistant", "4"))]
    tokenizer = publish(folder, template)
    documents = learned(folder, dict(messages=messages))
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    answers = [answer for _, runs in documents for _, answer in runs]
    assert documents[-1][0].removeprefix("<|endoftext|>").removesuffix("</s>") == whole
    assert answers[0].startswith(("Hello!", "<think>\n\n</think>\n\nHello!"))
    assert "4" in answers[-1] and len(answers) == 2


def test_a_prompt_that_begins_a_thought_which_answers_lack(folder):
    """As DeepSeek-R1's template and those of Qwen's models that always think have it: an answer is learned from where
    the template writes it on."""
    publish(folder, "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|eot|>{% endfor %}"
                    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}")
    (_, runs), = learned(folder, dict(messages=[dict(role="user", content="a"), dict(
        role="assistant", content="<think>hm</think>b")]))
    assert runs == [("<|endoftext|><|user|>a<|eot|><|assistant|>", "b<|eot|>")]


def test_what_only_links_or_names_messages_is_left_out_and_said_once(folder, capsys):
    """As every tool's answer has it in the format of OpenAI; and where a record is from, once for each file."""
    publish(folder, CHATML)
    messages = [dict(role="user", content="2 + 2?", id=1), dict(role="assistant", content="", tool_calls=CALL),
                dict(role="tool", content="4", tool_call_id="c1"), dict(role="assistant", content="4")]
    plain = [{key: value for key, value in message.items() if key not in ("id", "tool_call_id")}
             for message in messages]
    got = learned(folder, *[dict(messages=messages, source="web", id=i) for i in range(3)])
    said = capsys.readouterr().err
    assert got == learned(folder, *[dict(messages=plain)] * 3)
    for key in "id", "tool_call_id":
        assert said.count(f"line 1: the chat template does not use the key {key} of messages (said once)") == 1
    assert re.search(r"chat.jsonl: not read, of its records: (source \(3\), id \(3\)|id \(3\), source \(3\))\n", said)


def test_markers_that_are_no_tokens_are_named(folder, capsys):
    publish(folder, "{% for m in messages %}<|turn|>{{ m.role }} {{ m.content }}<|eot|>{% endfor %}")
    learned(folder, dict(prompt="a", completion="b"))
    assert f"{folder}/tokenizer.json: has no token <|turn|>, which the chat template writes" in capsys.readouterr().err
