"""An export describes the model as it was trained: transformers reads its texts and conversations, and stops by itself.

tests/test_huggingface.py compares the weights and config.json.
"""
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from runs import run

from run import checkpoint, cli, tokenizing
from run.chat import CHATML, Template
from run.data import Corpus
from test_huggingface import of_transformers

TINY = ("--layers 2 --hidden 64 --heads 2 --kv-heads 1 --ffn 128 --seq-len 24 --global-batch 16 --lr 1e-2 "
        "--sample-prompt=")
WORDS = "system user assistant one two three four five six".split()
CONTROL = "<|endoftext|> <|im_start|> <|im_end|> <|user|> <|bot|> <|end|> </s>".split()
ANSWERS = {"one": "two three", "two": "four", "three": "one two three four", "four": "six"}
ENDING = ("{% for m in messages %}<|{{ 'bot' if m.role == 'assistant' else m.role }}|> {{ m.content }} <|end|> "
          "{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}")
ENDLESS = ENDING.replace("<|end|> ", "")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A tokenizer of words, in a folder of its own; the first word is token 7."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(
        {word: i for i, word in enumerate(CONTROL + WORDS)}, unk_token="</s>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def conversations(path: Path) -> list[list[dict]]:
    found = [[dict(role="user", content=asked), dict(role="assistant", content=answer)]
             for asked, answer in ANSWERS.items()]
    path.write_text("".join(json.dumps(dict(messages=each)) + "\n" for each in found * 20))
    return found


def opened(folder: Path) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    return (transformers.AutoModelForCausalLM.from_pretrained(folder),
            transformers.AutoTokenizer.from_pretrained(folder))


def continued(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    """What transformers' `generate` adds by the settings of the export alone, in at most 30 tokens."""
    tokens = torch.tensor([prompt])
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=30, do_sample=False,
                          )[0, len(prompt):].tolist()


def test_a_model_of_bytes_is_exported_with_a_tokenizer_and_ends_its_texts(tmp_path):
    texts = ["one!\n", "two...\n", "six\n"]
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(texts * 20):
        (tmp_path / "texts" / f"{i:02d}.txt").write_text(text)
    run(f"{TINY} --data {tmp_path}/texts --steps 40 --checkpoint-dir {tmp_path}/run --export-hf {tmp_path}/hf")
    model, tokenizer = opened(tmp_path / "hf")
    every_byte = bytes(range(256)).decode("latin-1")
    for text in (every_byte, "naïve — 你好\n", "a  b\t'll"):
        assert tokenizer.encode(text) == list(text.encode()) and tokenizer.decode(list(text.encode())) == text
    begin = tokenizer.bos_token_id
    assert begin == 256 == tokenizer.convert_tokens_to_ids("<|endoftext|>") and len(tokenizer) == 257
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 256
    for text in texts:
        *more, end = continued(model, [begin, *text[:1].encode()])
        assert end == 256 and tokenizer.decode(more) == text[1:]


@pytest.mark.parametrize("template, ends", [("", ["<|endoftext|>", "<|im_end|>"]),
                                            (ENDING, ["</s>", "<|end|>"]), (ENDLESS, ["</s>", "<|user|>"])])
def test_a_model_of_conversations_is_exported_with_its_template_and_ends_its_answers(template, ends, folder, tmp_path):
    """From scratch, by our template too. Rendered by transformers, a conversation has the tokens of the data."""
    if template:
        (folder / "chat_template.jinja").write_text(template)
        (folder / "tokenizer_config.json").write_text(json.dumps(dict(
            tokenizer_class="PreTrainedTokenizerFast", bos_token="<|endoftext|>", eos_token="</s>")))
    given = conversations(tmp_path / "chat.jsonl")
    data = tmp_path / "data" / "tokens.bin"
    tokenizing.tokenize([str(tmp_path / "chat.jsonl")], str(folder / "tokenizer.json"), str(data))
    run(f"{TINY} --vocab {len(CONTROL + WORDS)} --data {data} --mask-documents --steps 40 --checkpoint-dir "
        f"{tmp_path}/run --export-hf {tmp_path}/hf")
    model, tokenizer = opened(tmp_path / "hf")
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(ends)
    tokens, begins, _ = Corpus([str(data)], len(CONTROL + WORDS)).read(0, 100)
    documents = [each.tolist() for each in np.split(tokens, np.flatnonzero(begins)[1:])]
    separator, turn_end = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "</s>"])
    for (asked, answer), document in zip(given, documents):
        whole = tokenizer.apply_chat_template([asked, answer], return_dict=False)
        assert document == [*whole, *[turn_end] * (template == ENDLESS)] and whole[0] == separator
        *said, end = continued(model, tokenizer.apply_chat_template([asked], add_generation_prompt=True,
                                                                    return_dict=False))
        assert tokenizer.decode(said) == answer["content"]
        assert tokenizer.decode([end]) == ("</s>" if template == ENDLESS else ends[1])


def test_records_beside_the_token_file_that_is_made_of_them_stay(folder, tmp_path):
    conversations(path := tmp_path / "tokens.json")
    before = path.read_text()
    tokenizing.tokenize([str(path)], str(folder / "tokenizer.json"), str(tmp_path / "tokens.bin"))
    assert path.read_text() == before


@pytest.mark.parametrize("template, ends, says", [
    ("{% for m in messages %}{{ m.content }} six {% endfor %}", [6], "answers end with 'six', which is no special "),
    ("{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}", [6], "answers end with 'user', which is no "),
    ({"default": ENDING, "tool_use": ENDING}, [6, 5], ""), ("{{ raise_exception('no') }}", [6], "")])
def test_a_word_that_answers_may_have_inside_is_no_end_of_them(template, ends, says, folder, capsys):
    """A template that refuses a short conversation has no end that we know; several templates stay where they are."""
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(
        chat_template=template, bos_token="<|endoftext|>", eos_token="</s>")))
    path = str(folder / "tokenizer.json")
    tokenizer = tokenizing.read_tokenizer(path)
    described = tokenizing.describe(tokenizer, tokenizing.marks_of(tokenizer, path), [Template(path)])
    want = "" if isinstance(template, dict) else '{{ "<|endoftext|>" }}' + template
    assert described == dict(eos_token_id=ends, chat_template=want) and says in capsys.readouterr().err


def published(folder: Path, eos: int | list[int], **generation) -> Path:
    """A small model of transformers in the tokenizer's folder."""
    model = of_transformers("llama")
    model.save_pretrained(folder)
    for name, settings in (("config.json", dict(bos_token_id=1, eos_token_id=eos, max_position_embeddings=32)),
                           ("generation_config.json", dict(eos_token_id=eos, **generation))):
        content = json.loads((folder / name).read_text()) | settings
        (folder / name).write_text(json.dumps(content))
    return folder


def test_a_published_model_keeps_what_training_does_not_change(folder, tmp_path):
    """Its ends, as its chats still have them; and its settings of generation. The longest sample of all runs counts."""
    conversations(tmp_path / "chat.jsonl")
    line = f"--data {tmp_path}/chat.jsonl --checkpoint-dir {tmp_path}/run --export-hf {tmp_path}/hf --sample-prompt="
    published(folder, [3, 6], temperature=0.5, do_sample=True)
    run(f"--init-from {folder} --steps 1 --warmup 0 --seq-len 48 {line}")
    model, tokenizer = opened(tmp_path / "hf")
    described = model.generation_config
    assert (described.bos_token_id, described.eos_token_id, described.temperature) == (0, [0, 2, 3, 6], 0.5)
    assert (model.config.bos_token_id, model.config.eos_token_id) == (0, [0, 2, 3, 6])
    assert model.config.max_position_embeddings == 48 and tokenizer.chat_template == '{{ "<|endoftext|>" }}' + CHATML
    run(f"--resume auto --steps 2 --warmup 0 --seq-len 24 --allow-mismatch {line}")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "hf").max_position_embeddings == 48
    folder.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=f"the run read {folder}, and there is no such folder any more"):
        checkpoint.export(tmp_path / "run" / "step-000002", str(tmp_path / "new"), "fp32")
    assert not (tmp_path / "new").exists()


def test_an_export_has_the_tokenizer_of_the_data_if_it_is_another_than_the_published_one(folder, tmp_path):
    """Then published ends are other tokens."""
    data, text = tmp_path / "data" / "tokens.bin", tmp_path / "text"
    text.write_text("one two three four " * 30)
    tokenizing.tokenize([str(text)], str(folder / "tokenizer.json"), str(data), "</s>")
    other = tmp_path / "other"
    other.mkdir()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"six": 0, "<s>": 1}, unk_token="six"))
    tokenizer.save(str(other / "tokenizer.json"))
    (other / "vocab.json").write_text("{}")
    (tmp_path / "hf" / "additional_chat_templates").mkdir(parents=True)
    for name in "chat_template.jinja", "additional_chat_templates/default.jinja":
        (tmp_path / "hf" / name).write_text("of an earlier export")
    (tmp_path / "hf" / "added_tokens.json").write_text('{"of an earlier export": 99}')
    run(f"--init-from {published(other, 5)} --data {data} --steps 0 --seq-len 24 --allow-mismatch --sample-prompt= "
        f"--checkpoint-dir {tmp_path}/run --export-hf {tmp_path}/hf")
    model, tokenizer = opened(tmp_path / "hf")
    assert tokenizer.encode("one six") == [10, 15] and not (tmp_path / "hf" / "vocab.json").exists()
    assert tokenizer.get_vocab().keys() == {*CONTROL, *WORDS}
    assert tokenizer.bos_token == tokenizer.eos_token == "</s>" and tokenizer.chat_template is None
    assert model.generation_config.eos_token_id == model.generation_config.bos_token_id == 6


def test_a_checkpoint_of_a_version_without_a_description_is_exported_as_far_as_it_is_known(folder, tmp_path):
    published_settings = dict(described=dict(cli.DESCRIBED, eos=[]), published="", tokenizer="")
    for corpus, known in ((dict(separator=0), 0), (dict(separator=None), None), ({}, None)):
        tokens = checkpoint.special_tokens(published_settings | dict(corpus=corpus))
        assert tokens == dict(bos_token_id=known, eos_token_id=known, pad_token_id=None)
