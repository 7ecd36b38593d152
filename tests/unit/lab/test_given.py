"""Arguments of a Python call under TRL's names."""

import types
from functools import partial

import pytest
from peft import LoraConfig

from valor.config import DataConfig
from valor.data.files import read_rows
from valor.errors import UserError
from valor.lab.given import InputFile, data_files, file_of_bytes, model_settings, of_trl, prompt_row

ROW = partial(prompt_row, data=DataConfig(), keep_prompt=False)
MODEL = "actor_rollout_ref.model"


def test_trls_names_of_arguments():
    given = {"train_dataset": [1], "eval_dataset": [2], "processing_class": 3, "reward_funcs": 4, "learning_rate": 5}
    expected = {"train_data": [1], "val_data": [2], "tokenizer": 3, "reward": 4, "learning_rate": 5}
    assert of_trl(given, MODEL) == expected == of_trl(expected, MODEL)


def test_adapters_of_peft():
    peft = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj"], task_type="CAUSAL_LM")
    expected = {f"{MODEL}.lora_rank": 4, f"{MODEL}.lora_alpha": 8, f"{MODEL}.target_modules": ["k_proj", "q_proj"]}
    assert of_trl({"peft_config": peft}, MODEL) == expected
    assert of_trl({"peft_config": None}, MODEL) == {}
    with pytest.raises(UserError, match="adapters here have no lora_dropout"):
        of_trl({"peft_config": LoraConfig(r=4, lora_dropout=0.1)}, MODEL)
    with pytest.raises(UserError, match="adapters here have no bias, layers_to_transform: leave it out"):
        of_trl({"peft_config": LoraConfig(r=4, layers_to_transform=[0], bias="all")}, MODEL)


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"args": 1}, "args: give the settings of TRL's config as keywords"),
        ({"ref_model": 1}, "ref_model: the reference is the policy"),
        ({"callbacks": []}, "callbacks: take the steps one by one"),
        ({"train_data": [], "train_dataset": []}, "train_dataset: train_data is the same argument"),
    ],
)
def test_what_has_no_counterpart_is_answered(given, answer):
    with pytest.raises(UserError, match=f"^{answer}"):
        of_trl(given, MODEL)


def test_a_table_is_not_taken_for_names_of_files():
    table = types.SimpleNamespace(columns=["prompt", "answer"])
    with pytest.raises(UserError, match="train_data is a SimpleNamespace: give its rows as dicts, or a data set"):
        data_files("train", table, dict)
    with pytest.raises(UserError, match="val_data is a DataFrame: give its rows as dicts"):
        data_files("val", pytest.importorskip("pandas").DataFrame({"prompt": ["a"], "answer": ["b"]}), dict)


def test_images_of_rows_are_paths_from_here_or_data_uris(tmp_path, monkeypatch):
    """As data sets of TRL have them, in the file that the run reads."""
    image = pytest.importorskip("PIL.Image").new("RGB", (4, 4), "red")
    monkeypatch.chdir(tmp_path)
    image.save("a.png")
    content = (tmp_path / "a.png").read_bytes()
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what"}]}]
    rows = [{"prompt": prompt, "images": [image, {"bytes": content, "path": None}, "a.png"], "answer": "red"}]
    file = data_files("train", rows, ROW)
    file.into(tmp_path / "inputs")
    (row,) = read_rows(tmp_path / "inputs" / file.name, DataConfig(image_key="images"))
    read = [x if isinstance(x, bytes) else x.read_bytes() for x in row.images]
    assert read[1:] == [content] * 2 and len(read) == 3 and row.extra_info == {"answer": "red"}
    assert row.messages == [{"role": "user", "content": "<image>what"}]
    file = data_files("train", [{"prompt": "what", "image": "b.png"}], ROW)
    file.into(tmp_path / "inputs")
    assert read_rows(tmp_path / "inputs" / file.name)[0].extra_info == {"image": "b.png"}
    row = ROW({"prompt": "what", "image": "a.png"})  # a function for rewards may read it
    assert row["image"] == [str(tmp_path / "a.png")] and row["extra_info"] == {"image": "a.png"}
    with pytest.raises(UserError, match=r"line 1, image 0: there is no file 'b\.png'"):
        read_rows(tmp_path / "inputs" / file.name, DataConfig(image_key="image"))


def test_columns_have_the_names_that_the_run_sets():
    data = DataConfig(prompt_key="asked", reward_fn_key="kind", image_key="picture")
    image = pytest.importorskip("PIL.Image").new("RGB", (4, 4), "red")
    row = {"asked": "what", "prompt": "no", "kind": "mine", "picture": [image], "answer": "red", "ability": "see"}
    read = prompt_row(row, data, keep_prompt=True)
    assert (read["asked"], read["kind"]) == ([{"role": "user", "content": "what"}], "mine")
    assert read["picture"][0].startswith("data:image")
    assert read["extra_info"] == {"answer": "red", "prompt": "what", "asked": "what", "ability": "see"}


def test_a_changed_tokenizer_is_another_input():
    """Else the next try in the same folder would read the old one."""
    tokenizer = types.SimpleNamespace(
        get_vocab=lambda: {"a": 0}, chat_template=None, special_tokens_map={}, save_pretrained=print
    )
    model = types.SimpleNamespace(
        save_pretrained=print, state_dict=dict, config=types.SimpleNamespace(to_json_string=lambda: "{}")
    )

    def made(model, processor=tokenizer):
        return next(file for file in model_settings("model", model, processor).values() if isinstance(file, InputFile))

    before = [made(model).name, made("policy").name, made(None).name, made(model, None).name]
    tokenizer.chat_template = "{{ messages }}"
    after = [made(model).name, made("policy").name, made(None).name, made(model, None).name]
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, False, False, True]
    processor = types.SimpleNamespace(tokenizer=tokenizer, chat_template="{{ messages }}", save_pretrained=print)
    assert made("policy", processor).write is processor.save_pretrained
    model.config._name_or_path = "/nowhere/actor.now"  # of a policy in the middle of a run
    with pytest.raises(UserError, match="a loaded model comes with its tokenizer: give tokenizer="):
        model_settings("model", model, reads_text=True)


def test_an_input_that_was_half_written_is_written_again(tmp_path):
    tries = []

    def write(folder):
        folder.mkdir(exist_ok=True)
        tries.append(folder)
        if len(tries) == 1:
            raise KeyboardInterrupt
        (folder / "tokenizer.json").write_text("{}")

    tokenizer = InputFile("tokenizer-1", write)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.into(tmp_path)
    assert [path.name for path in tokenizer.into(tmp_path).iterdir()] == ["tokenizer.json"]
    assert file_of_bytes("rows", ".jsonl", b"x").into(tmp_path).read_bytes() == b"x"
