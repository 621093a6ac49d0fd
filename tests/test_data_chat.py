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
    (folder / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return learned_of(folder, folder / "chat.jsonl", ignored)


def learned_of(folder: Path, file: Path, ignored=()) -> list[tuple[str, list[tuple[str, str]]]]:
    out = folder / "out" / "tokens.bin"
    count, _ = tokenizing.tokenize([str(file)], str(folder / "tokenizer.json"), str(out), ignored=ignored)
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
    begin = "<s>" if "bos_token" in template else "<|endoftext|>"
    assert all(text.startswith(begin) and text.count("<s>") == text.count("[INST]") for text, _ in documents)


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
    corpus = Corpus([str(folder / "out" / "tokens.bin")], 400)
    tokens, begins, targets = corpus.read(0, len(corpus))
    assert tokens.tolist() == want["input_ids"] and np.flatnonzero(begins).tolist() == [0]
    assert targets.tolist() == [value == 1 for value in want["assistant_masks"]]


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


@pytest.mark.parametrize("answer", ["b", "<tool_call>{}</tool_call>", "<", "<thinking>", "\n<think"])
def test_an_answer_that_begins_like_a_prompt_s_thought(folder, answer):
    """All of it is learned, not only what differs from <think>."""
    publish(folder, "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|eot|>{% endfor %}"
                    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}")
    messages = [dict(role="user", content="a"), dict(role="assistant", content=answer)]
    (_, runs), = learned(folder, dict(messages=messages))
    assert runs == [("<|endoftext|><|user|>a<|eot|><|assistant|>", f"{answer}<|eot|>")]


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
    assert re.search(r"chat.jsonl: keys not used: (source|id) \(3 records\), (source|id) \(3 records\)\n", said)


def test_markers_that_are_no_tokens_are_named(folder, capsys):
    publish(folder, "{% for m in messages %}<|turn|>{{ m.role }} {{ m.content }}<|eot|>{% endfor %}")
    learned(folder, dict(prompt="a", completion="b"))
    assert f"{folder}/tokenizer.json: has no token <|turn|>, which the chat template writes" in capsys.readouterr().err


# ---- calls of tools -------------------------------------------------------------------------------------------------

WRITES_CALLS = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
                "{% for c in m.tool_calls or [] %}<tool_call>CALL</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
CALLS = {  # how published templates write a call, and which form of its arguments they want
    "qwen 2.5": ('{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}', dict),
    "qwen 3.5": ("{% for key, value in c.function.arguments | items %}{{ key }}={{ value }} {% endfor %}", dict),
    "gemma 4": ("{{ '{' + c.function.arguments + '}' if c.function.arguments is string else c.function.arguments }}",
                dict),
    "deepseek 3": ("{{ c.function.name + '\n' + c.function.arguments + '\n' }}", str),
}
ARGUMENTS = [dict(city="Zürich", days=2), dict(query="x", exact=True), {}]


@pytest.mark.parametrize("form", ["objects", "JSON", "calls as JSON", "parquet"])
@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_calls_are_written_as_the_template_wants_them(folder, name, form):
    """Whichever form the data has. Arrow fills objects with nulls, which a template would write as arguments."""
    call, wanted_form = CALLS[name]
    tokenizer = publish(folder, WRITES_CALLS.replace("CALL", call))

    def conversation(arguments, calls=lambda found: found) -> list[dict]:
        function = dict(name="find", arguments=arguments)
        return [dict(role="user", content="a"), dict(role="assistant", content="b", tool_calls=calls(
            [dict(type="function", function=function)]))]
    as_text = [json.dumps(each, ensure_ascii=form == "JSON") for each in ARGUMENTS]  # as it is given, if it is text
    wanted = [pair for each in (as_text if wanted_form is str else ARGUMENTS)
              for pair in as_generated(tokenizer, conversation(each), True)]
    if form == "calls as JSON":
        records = [dict(messages=conversation(each, json.dumps)) for each in ARGUMENTS]
    else:
        records = [dict(messages=conversation(each)) for each in (as_text if form == "JSON" else ARGUMENTS)]
    if form == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(records), folder / "chat.parquet")
        documents = learned_of(folder, folder / "chat.parquet")
    else:
        documents = learned(folder, *records)
    got = [(before.removeprefix("<|endoftext|>"), answer) for _, runs in documents for before, answer in runs]
    assert got == wanted


@pytest.mark.parametrize("tools", ["[]", "", [], None, "null"])
def test_an_empty_list_of_tools_is_none(folder, tools):
    publish(folder, TEMPLATES["glm 4"][0])
    record = dict(SHAPES["messages"])
    assert learned(folder, record | dict(tools=tools)) == learned(folder, record)


# ---- what a template leaves out -------------------------------------------------------------------------------------

def turns_by(branches: str) -> str:
    return (f"{{% for m in messages %}}{branches}{{% endfor %}}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
LEAVES_OUT = {  # a template, and the message that is not in its text; None: all are
    "no tools": (turns_by(f"{{% if m.role in ('system', 'user', 'assistant') %}}{TURN}{{% endif %}}"), "tool, which is "
                                                                                                       "number 4"),
    "no system": (turns_by(f"{{% if m.role != 'system' %}}{TURN}{{% endif %}}"), "system, which is number 1"),
    "a system message at the beginning": (turns_by(f"{{% if m.role != 'system' or loop.first %}}{TURN}{{% endif %}}"),
                                          "system, which is number 6"),
    "lists of parts": (turns_by("<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'text' %}"
                                "{{ part.text }}{% endif %}{% endfor %}<|im_end|>"), "system, which is number 1"),
    "as JSON": (turns_by(TURN.replace("m.content", "m.content | tojson")), None),
    "trimmed": (turns_by(TURN.replace("m.content", "m.content | trim")), None),
    "all": (turns_by(TURN), None),
}


@pytest.mark.parametrize("template, missing", LEAVES_OUT.values(), ids=LEAVES_OUT)
def test_a_message_that_a_template_leaves_out_is_refused(folder, capsys, template, missing):
    """A short content could be anywhere, so that it is not enough to look for it."""
    publish(folder, template)
    messages = [dict(role=role, content=content) for role, content in (
        ("system", "s"), ("user", ' "2"\n+ 2? '), ("assistant", "Let's see."), ("tool", "4"), ("assistant", "It is 4."),
        ("system", "From now on, speak French."), ("user", "Et 3 + 3?"), ("assistant", "6"))]
    if missing:
        line = f"line 1: [^\n]*the chat template does not use the content of a message of the role {missing}"
        with pytest.raises(ValueError, match=line):
            learned(folder, dict(messages=messages))
    else:
        learned(folder, dict(messages=messages))
    assert "leaves out" not in capsys.readouterr().err


THINKS = ("{% set parts = m.content.split('</think>') %}<|im_start|>{{ m.role + '\n' }}{% if parts | length > 1 %}"
          "{{ '<think>\n' + parts[0].split('<think>')[-1].strip() + '\n</think>\n\n' }}{% endif %}"
          "{{ parts[-1].strip() }}<|im_end|>")


@pytest.mark.parametrize("name, is_left_out", [("as DeepSeek-R1", True), ("qwen 3", False), ("in contents", False)])
def test_thoughts_that_a_template_leaves_out_of_all_answers_are_named(folder, capsys, name, is_left_out):
    """Once. Qwen 3 has them in the answer that a model generates, and so in a document."""
    template = {"qwen 3": TEMPLATES["qwen 3"][0], "in contents": turns_by(THINKS), "as DeepSeek-R1": turns_by(
        TURN.replace("m.content", "m.content.split('</think>')[-1]"))}[name]
    publish(folder, template)
    thought = "reasoning_content" if name == "qwen 3" else "content"
    messages = [message for i in range(3) for message in (
        dict(role="user", content=f"{i} + {i}?"), dict(role="assistant", content=f"{2 * i}") | {
            thought: f"<think>twice {i}</think>{2 * i}"})]
    documents = learned(folder, dict(messages=messages), dict(messages=messages))
    answers = [answer for _, runs in documents for _, answer in runs]
    said = capsys.readouterr().err
    assert said.count("line 1: the chat template leaves out a part of a message of the role assistant") == is_left_out
    assert any("twice" in answer for answer in answers) != is_left_out


@pytest.mark.parametrize("inside, outside", [("{{ m.content }}<|im_end|>", ""), ("{{ m.content }}", "<|im_end|>")])
def test_marks_that_leave_out_the_end_of_an_answer_are_named(folder, capsys, inside, outside):
    """What is learned is what transformers says."""
    tokenizer = publish(folder, turns_by(
        "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}" + inside + "{% endgeneration %}"
        + outside + "{% else %}{{ m.content }}<|im_end|>{% endif %}"))
    messages = SHAPES["messages"]["messages"]
    want = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    (_, runs), = learned(folder, dict(messages=messages))
    assert [answer for _, answer in runs] == [tokenizer.decode([token for token, is_target in zip(
        want["input_ids"], want["assistant_masks"]) if is_target])]
    said = "line 1: the chat template writes <|im_end|> after an answer, outside of its generation marks"
    assert capsys.readouterr().err.count(said) == (outside != "")


# ---- where a template is --------------------------------------------------------------------------------------------

def test_templates_are_found_where_transformers_writes_them(folder, capsys):
    """chat_template.json is what it wrote beside processors."""
    messages = SHAPES["messages"]["messages"]
    plain, with_tools = turns_by(TURN), CHATML
    tokenizer = publish(folder, plain)
    places = {"tokenizer_config.json": json.dumps(dict(chat_template=plain)), "chat_template.jinja": plain,
              "chat_template.json": json.dumps(dict(chat_template=plain))}
    for name, content in places.items():
        for other in places:
            (folder / other).unlink(missing_ok=True)
        (folder / name).write_text(content)
        (text, _), = learned(folder, dict(messages=messages))
        assert text.removeprefix("<|endoftext|>") == tokenizer.apply_chat_template(messages, tokenize=False), name
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(with_tools)
    (folder / "chat_template.jinja").write_text(plain)
    (text, _), = learned(folder, dict(messages=messages, tools=TOOLS))
    assert text.removeprefix("<|endoftext|>") == tokenizer.apply_chat_template(
        messages, tokenize=False, chat_template=with_tools, tools=TOOLS)
    assert "no chat template lies beside it" not in capsys.readouterr().err


def test_without_a_template_chatml_is_said_and_a_tokenizer_may_have_any_name(folder, capsys):
    """The template beside a tokenizer of another name belongs to a tokenizer.json there."""
    (folder / "mine.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (folder / "tokenizer.json").unlink()
    (folder / "chat.jsonl").write_text(json.dumps(SHAPES["messages"]))
    for files in ({}, {"tokenizer.json": "{}", "chat_template.jinja": turns_by(TURN),
                       "chat_template.json": json.dumps(dict(chat_template=turns_by(TURN)))}):
        for name, content in files.items():
            (folder / name).write_text(content)
        out = folder / f"out-{len(files)}" / "tokens.bin"
        tokenizing.tokenize([str(folder / "chat.jsonl")], str(folder / "mine.json"), str(out))
        said = f"data: {folder}/mine.json: no chat template lies beside it, so conversations are written as ChatML\n"
        assert said in capsys.readouterr().err
    assert out.read_bytes() == (folder / "out-0" / "tokens.bin").read_bytes()


@pytest.mark.parametrize("template, variable", [
    ("{{ strftime_now('%Y') }}", ""), ("{{ date_string if date_string is defined else strftime_now('%Y') }}",
                                       " if date_string is not in chat_template_kwargs")])
def test_a_template_that_writes_the_date_is_named(folder, capsys, template, variable):
    publish(folder, template + turns_by(TURN))
    learned(folder, SHAPES["messages"])
    assert f"{folder}/tokenizer.json: the chat template writes today's date{variable}\n" in capsys.readouterr().err


@pytest.mark.parametrize("settings", [
    dict(added_tokens_decoder={"900": dict(content="<|turn|>", special=True)}), dict(bos_token="<|turn|>")])
def test_a_token_that_only_another_file_has_is_refused_where_it_is_written(folder, settings):
    """By tokenizer.json alone it would be pieces, though transformers reads it as one token."""
    for template, is_written in (("<|turn|>" + turns_by(TURN), True), (turns_by(TURN), False)):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | dict(chat_template=template)))
        if is_written:
            with pytest.raises(ValueError, match=r"line 1: [^\n]*<\|turn\|> is a token of tokenizer_config.json or "):
                learned(folder, SHAPES["messages"])
        else:
            assert len(learned(folder, SHAPES["messages"])) == 1


# ---- tokens across the beginning of an answer -----------------------------------------------------------------------

ANSWER = "Yes, the answer is yes."
BEGINNINGS = {  # what is before an answer, and in it
    "a space before": ("\nassistant: ", "{{ m.content }}"), "a space inside": ("\nassistant:", "{{ ' ' + m.content }}"),
    "a line": ("\nassistant:\n", "{{ m.content }}"), "a marker": ("<|im_start|>assistant\n", "{{ m.content }}"),
    "nothing": ("\n# ", "{{ m.content }}")}


@pytest.mark.parametrize("before, inside", BEGINNINGS.values(), ids=BEGINNINGS)
@pytest.mark.parametrize("kind", ["trimmed", "bytes", "llama 2"])
def test_the_first_word_of_an_answer_is_learned_however_tokens_lie(tmp_path, kind, before, inside):
    """As transformers' mask of generation marks has it: with a token that begins before the answer. A template with
    marks and the same without have the same targets, up to the end, which the marks leave out here."""
    models, pre = tokenizers.models, tokenizers.pre_tokenizers
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre.Metaspace() if kind == "llama 2" else pre.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, special_tokens=CONTROL,
                                             initial_alphabet=pre.ByteLevel.alphabet())
    tokenizer.train_from_iterator([f"user: {ANSWER}\nassistant: {ANSWER} # {ANSWER}\n"] * 20, trainer)
    if kind == "trimmed":  # the places of tokens have no spaces
        tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    elif kind == "llama 2":
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("▁"),
                                                                tokenizers.normalizers.Replace(" ", "▁")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    messages, answers = [dict(role="user", content=ANSWER), dict(role="assistant", content=ANSWER)] * 2, []
    for begin, end in (("{% generation %}", "{% endgeneration %}"), ("", "")):
        published = publish(tmp_path, (
            "{% for m in messages %}{% if m.role == 'assistant' %}" + before + begin + inside + end + "</s>{% else %}"
            "user: {{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}" + before + "{% endif %}"))
        learned(tmp_path, dict(messages=messages))
        corpus = Corpus([str(tmp_path / "out" / "tokens.bin")], 1000)
        tokens, _, targets = corpus.read(1, len(corpus) - 1)
        answers.append((tokens.tolist(), targets.tolist()))
        if begin:
            want = published.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, ends = want["input_ids"], [token == CONTROL.index("</s>") for token in want["input_ids"]]
    mask = [value == 1 for value in want["assistant_masks"]]
    if not (kind == "trimmed" and before.endswith(":")):  # there transformers finds no token at a space, and stops
        assert answers[0] == (ids, mask)
    assert answers[1] == (ids, [is_target or is_end for is_target, is_end in zip(answers[0][1], ends)])


@pytest.mark.parametrize("name", ["llama 2", "qwen 2"])
def test_a_prompt_begins_as_conversations_do_in_training(folder, name):
    """By the template if it writes a beginning, and only then without the separator."""
    tokenizer = publish(folder, TEMPLATES[name][0])
    messages = [dict(role="user", content="2 + 2?")]
    wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    separator = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    codec = tokenizing.Codec(separator, tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")),
                             str(folder / "tokenizer.json"))
    assert codec.prompt("2 + 2?", chat=True) == ([] if name == "llama 2" else [separator]) + wanted


@pytest.mark.parametrize("answer", ["Yes.", " Yes.", "\n\nYes."])
def test_a_marker_that_takes_spaces_of_an_answer_is_not_learned(folder, answer):
    """As Phi 3's markers do. What precedes the answer are the tokens of the prompt."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([tokenizers.AddedToken("<|turn|>", rstrip=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    publish(folder, "{% for m in messages %}<|turn|>{{ m.content }}<|eot|>{% endfor %}"
                    "{% if add_generation_prompt %}<|turn|>{% endif %}")
    learned(folder, dict(messages=[dict(role="user", content="Really?"), dict(role="assistant", content=answer)]))
    prompt = tokenizer.encode("<|turn|>Really?<|eot|><|turn|>").ids
    corpus = Corpus([str(folder / "out" / "tokens.bin")], 400)
    tokens, _, targets = corpus.read(1, len(corpus) - 1)
    assert tokens[:len(prompt)].tolist() == prompt
    assert targets.tolist() == [False] * len(prompt) + [True] * (len(tokens) - len(prompt))
