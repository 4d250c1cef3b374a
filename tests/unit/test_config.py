import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from csc.config import Config, base_method, differences, layers, methods, parse_overrides, resolve
from csc.config.groups import Settings
from csc.config.reading import _alternatives, _choices, note_old_name
from csc.config.schema import EXECUTION_ONLY
from csc.config.tree import flatten, merged
from csc.errors import BadConfig
from csc.methods import HEADS, registered

DATASETS = ("digits", "voc", "coco", "mine")
EVERY = [(method, dataset) for method in methods() for dataset in DATASETS]


def facts(method: str) -> dict[str, Any]:
    """What a method has to know of a data set without a preset."""
    return {"krt": {"labels_per_image": 2.0, "of_classes": 12}} if base_method(method) == "krt" else {}


def leaves(kind: Any, path: str = "") -> dict[str, Any]:
    """The declared type of every setting, by its whole key."""
    found: dict[str, Any] = {}
    for item in msgspec.structs.fields(kind):
        group = isinstance(item.type, type) and issubclass(item.type, Settings)
        found |= leaves(item.type, f"{path}{item.name}.") if group else {f"{path}{item.name}": item.type}
    return found


def everything() -> dict[str, tuple[str, Any]]:
    """Every setting there is, with a method that reads it and its type."""
    found: dict[str, tuple[str, Any]] = {}
    for method in ("csc", *methods()):
        for key, hint in leaves(type(resolve("voc", {"method": method}))).items():
            found.setdefault(key, (method, hint))
    return found


ALL = everything()


def another(key: str, method: str, hint: Any, value: Any) -> Any:
    """A valid value other than the present one."""
    special = {
        "method": "lwf",
        "backbone.name": "resnet18",
        "init": "w.safetensors",
        "agcn.embeddings": "words.npz",
        "held_out": 5,
        "krt.width": 256,
        "krt.heads": 4,
        "head": next((head for head in registered()[base_method(method)].heads if head != value), value),
    }
    if key in special:
        return special[key]
    kinds = _alternatives(hint)
    if int in kinds:
        return 2 if value == "auto" else value + 1
    if choices := _choices(hint):
        return next(option for option in choices if option != value)
    if bool in kinds:
        return not value
    return value / 2 or 0.5


def nested(key: str, value: Any) -> dict[str, Any]:
    *parents, leaf = key.split(".")
    tree: dict[str, Any] = {leaf: value}
    for parent in reversed(parents):
        tree = {parent: tree}
    return tree


def refused(dataset: str, overrides: Any) -> str:
    with pytest.raises(BadConfig) as caught:
        resolve(dataset, overrides)
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    return message


def test_each_layer_overrides_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keys = ("train.epochs", "train.batch_size", "cigcn.width", "input.size", "seed")  # the last layer to set each
    files: list[dict[str, Any]] = [{} for _ in range(5)]
    for layer in range(1, 5):
        for key in keys[layer:]:
            files[layer] = merged(files[layer], nested(key, 100 + layer))
    for name in ("presets", "values"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(layers, f"_{name.upper()}", tmp_path / name)
    (tmp_path / "presets" / "voc.yaml").write_text(yaml.safe_dump(files[1]))
    own = {"description": "x", "like": "csc", "settings": files[2], "datasets": {"voc": files[3], "coco": {"seed": 7}}}
    (tmp_path / "values" / "mine.yaml").write_text(yaml.safe_dump(own))
    (tmp_path / "values" / "csc.yaml").write_text("description: x")
    monkeypatch.setattr(layers, "methods", methods.__wrapped__)
    values = resolve("voc", files[4] | {"method": "mine"}).flat()
    assert [values[key] for key in keys] == [Config().train.epochs, 101, 102, 103, 104]


def test_a_setting_of_a_group_leaves_its_neighbours_alone():
    before, after = (resolve("digits", overrides).flat() for overrides in (None, {"train": {"epochs": 3}}))
    assert {key for key in before if before[key] != after[key]} == {"train.epochs"}


def test_the_files_override_each_other_in_order():
    assert Config().max_entropy.beta == 0
    assert resolve("voc", {"method": "lwf"}).max_entropy.beta == 0
    assert resolve("voc", {"method": "csc"}).max_entropy.beta == 4e-2
    assert resolve("voc", {"method": "csc", "max_entropy": {"beta": 0.5}}).max_entropy.beta == 0.5
    assert resolve("voc", {"method": "joint"}).loss.form == "asl"  # the method's own
    assert resolve("digits", {"method": "joint"}).loss.form == "bce"  # the method's on this data set
    assert resolve("digits", {"method": "joint", "loss": {"form": "asl"}}).loss.form == "asl"


def test_an_unknown_data_set_is_treated_like_coco():
    assert resolve("mine") == resolve("coco") != resolve("voc")


@pytest.mark.parametrize(("method", "dataset"), EVERY)
def test_resolving_the_json_again_changes_nothing(method: str, dataset: str):
    first = resolve(
        dataset,
        {**facts(method), "method": method, "seed": 5, "train": {"lr": "3e-3"}, "release_quirks": {"no_shuffle": "on"}},
    )
    again = resolve(dataset, first.to_json())
    assert again == first
    assert again.to_json() == first.to_json()
    assert again.fingerprint() == first.fingerprint()
    assert first.method == method


@pytest.mark.parametrize(("method", "dataset"), EVERY)
def test_what_differs_from_the_defaults_resolves_to_the_same_settings(method: str, dataset: str):
    plain = {**facts(method), "method": method}
    for overrides in (plain, {**plain, "seed": 5, "train": {"lr": "3e-3"}, "release_quirks": {"no_shuffle": "on"}}):
        config = resolve(dataset, overrides)
        text = differences(dataset, config)
        assert resolve(dataset, text) == config
        assert differences(dataset, resolve(dataset, text)) == text
        assert len(text) < len(config.to_json()) / 4


def test_a_setting_given_at_its_default_is_no_difference():
    given = resolve("voc", {"method": "lwf", "train": {"epochs": resolve("voc", {"method": "lwf"}).train.epochs}})
    assert differences("voc", given) == '{"method": "lwf", "seed": 0}'


def test_the_json_means_the_same_on_any_data_set():
    assert {resolve(dataset, resolve("voc").to_json()) for dataset in DATASETS} == {resolve("voc")}


def test_empty_overrides_in_any_form_are_the_defaults():
    assert resolve("voc", "") == resolve("voc", "{}") == resolve("voc", {}) == resolve("voc", None) == resolve("voc")


@pytest.mark.parametrize("dataset", ["voc", "digits"])
@pytest.mark.parametrize("key", ALL)
def test_every_setting_can_be_set_from_the_command_line_and_changes_the_fingerprint(key: str, dataset: str):
    method, hint = ALL[key]
    frozen, sized = ["backbone.frozen=true"], ["memory.per_class=2"]
    needed = {"features.views": frozen, "statistics.replay": frozen, "memory.sampler": sized}.get(key, [])
    before = resolve(dataset, parse_overrides([f"method={method}", *needed]))
    value = another(key, method, hint, before.flat()[key])
    after = resolve(dataset, parse_overrides([f"method={method}", *needed, f"{key}={value}"]))
    assert after.flat()[key] == value != before.flat()[key]
    assert type(after.flat()[key]) is type(value)
    if key not in ("method", "head"):  # which bring settings of their own
        assert {other for other in before.flat() if before.flat()[other] != after.flat()[other]} == {key}
    unread = key in EXECUTION_ONLY or key in before.unread()
    assert (after.fingerprint() == before.fingerprint()) == unread  # a resumed run may change these


def test_the_settings_walked_by_the_test_above_are_all_there_are():
    assert set(ALL) >= set(Config().flat())
    assert len(ALL) > 70


def test_a_run_has_no_setting_that_its_method_and_head_do_not_read():
    for method in methods():
        kind = registered()[base_method(method)]
        groups = {key.partition(".")[0] for key in resolve("voc", {"method": method}).flat() if "." in key}
        shared = {"backbone", "input", "features", "train", "loss", "max_entropy", "register", "release_quirks"}
        memory = {"memory"} if kind.memory_settings else set()
        own = {*kind.own_settings, HEADS[kind.heads[0]].settings} - {None}
        assert groups == shared | memory | {type_.__name__.removesuffix("Settings").lower() for type_ in own}, method


@pytest.mark.parametrize(
    ("items", "line"),
    [
        (["method=lwf", "krt.threshold=0.5"], "krt.threshold: method 'lwf' does not read it, krt, krt-r would"),
        (
            ["method=er", "loss.alpha=0.5"],
            "loss.alpha: method 'er' does not read it, agcn, agcn-r, csc, csc-r, lwf ",
        ),
        (["method=joint", "memory.per_class=2"], "memory.per_class: method 'joint' does not read it, "),
        (
            ["method=lwf", "cigcn.width=8"],
            "cigcn.width: read only with another head than the present one",
        ),
    ],
)
def test_a_setting_that_nothing_in_the_run_reads_is_refused(items: list[str], line: str):
    assert refused("voc", parse_overrides(items)).startswith(line)


def test_settings_for_several_methods_count_where_they_are_read():
    shared = {"cigcn": {"width": 8}, "krt": {"width": 16}, "train": {"epochs": 3}}
    csc, lwf = (resolve("voc", {"method": method}, shared).flat() for method in ("csc", "lwf"))
    assert (csc["cigcn.width"], csc["train.epochs"], lwf["train.epochs"]) == (8, 3, 3)
    assert not {"cigcn.width", "krt.width"} & set(lwf)
    assert resolve("voc", {"train": {"epochs": 4}}, shared).train.epochs == 4


def test_the_spelling_of_the_version_before_is_taken_with_a_hint(capsys: pytest.CaptureFixture[str]):
    note_old_name.cache_clear()
    assert resolve("voc", {"old_label_policy": "masked"}) == resolve("voc", {"loss": {"old_labels": "masked"}})
    said = capsys.readouterr()
    assert said.err.startswith("note: old_label_policy is now called loss.old_labels; the next version will refuse")
    assert said.out == ""  # the answer of `csc run --json` stands there


@pytest.mark.parametrize("true", [True, "true", "on"])
def test_the_switch_of_batch_norm_is_taken_by_its_old_name_for_one_version(
    capsys: pytest.CaptureFixture[str], true: Any
):
    note_old_name.cache_clear()
    frozen = {"train": {"batch_norm": "frozen_after_base"}}
    old = {"release_quirks": {"freeze_bn_after_base": true, "no_shuffle": True}}
    assert resolve("voc", old) == resolve("voc", {**frozen, "release_quirks": {"no_shuffle": True}})
    assert capsys.readouterr().err.count("is now called train.batch_norm=frozen_after_base") == 1
    assert resolve("voc", shared={"release_quirks": {"freeze_bn_after_base": true}}) == resolve("voc", frozen)


def test_a_model_of_the_version_before_is_read_without_a_word(capsys: pytest.CaptureFixture[str]):
    assert resolve("voc", {"release_quirks": {"freeze_bn_after_base": False}}).train.batch_norm == "live"
    assert capsys.readouterr() == ("", "")
    assert refused("voc", {"release_quirks": {"freeze_bn_after_base": 2}}).endswith("=2: expected true or false")


def test_a_method_that_changes_the_backbone_says_that_it_cannot_be_frozen():
    wanted = {"method": "l2p", "init": "scratch"}
    assert not resolve("digits", wanted).backbone.frozen
    message = refused("digits", {**wanted, "backbone": {"frozen": True}, "features": {"views": 1}})
    assert "method 'l2p'" in message
    assert "cannot be frozen" in message


def test_a_low_rank_needs_a_learned_matrix():
    message = refused("voc", {"cigcn": {"rank": 4, "correlation": "Z->S"}})
    assert "cigcn.rank=4" in message
    assert "cigcn.correlation=G->S" in message


def test_the_fingerprint_covers_what_else_identifies_a_run():
    settings = resolve("voc")
    marks = {settings.fingerprint(*more) for more in ((), ("a",), ("b",), ("a", "b"), ("ab",))}
    assert len(marks) == 5
    assert settings.fingerprint("a", "b") == settings.fingerprint("a", "b")


@pytest.mark.parametrize(
    ("text", "number"), [("4e-5", 4e-5), ("4E-5", 4e-5), (".5", 0.5), ("1", 1.0), ("+0.25", 0.25), (" 0.75 ", 0.75)]
)
def test_numbers_may_be_written_in_any_usual_form(text: str, number: float):
    assert resolve("voc", parse_overrides([f"train.lr={text}"])).train.lr == number


@pytest.mark.parametrize(
    ("word", "value"), [("true", True), ("True", True), ("yes", True), ("on", True), ("false", False), ("OFF", False)]
)
def test_switches_may_be_written_in_any_usual_form(word: str, value: bool):
    assert resolve("voc", parse_overrides([f"cigcn.plain={word}"])).cigcn.plain is value


def test_a_whole_number_is_as_good_as_a_real_one_and_the_other_way_round():
    one, other = (resolve("voc", text) for text in ('{"loss": {"alpha": 1}}', '{"loss": {"alpha": 1.0}}'))
    assert one.to_json() == other.to_json()
    assert resolve("voc", {"train": {"epochs": 3.0}}).to_json() == resolve("voc", {"train": {"epochs": 3}}).to_json()


# What a person types, the whole key that the answer must name, and what would be right.
TYPED = [
    ("train.epochs=three", "train.epochs", "a whole number"),
    ("train.epochs=2.5", "train.epochs", "a whole number"),
    ("train.epochs=", "train.epochs", "a whole number"),
    ("train.epochs=0", "train.epochs", "1 or more"),
    ("train.epochs=-3", "train.epochs", "1 or more"),
    ("train.epochs=true", "train.epochs", "a whole number"),
    ("train.batch_size=1", "train.batch_size", "2 or more"),
    ("train.workers=-2", "train.workers", "0 or more"),
    ("train.workers=many", "train.workers", "a whole number or 'auto'"),
    ("train.processes=0", "train.processes", "1 or more"),
    ("train.nodes=auto", "train.nodes", "a whole number"),
    ("train.accumulate=0", "train.accumulate", "1 or more"),
    ("cigcn.rank=-1", "cigcn.rank", "0 or more"),
    ("train.lr=0", "train.lr", "a positive number"),
    ("train.lr_base=-1e-4", "train.lr_base", "a positive number"),
    ("train.lr=fast", "train.lr", "a positive number"),
    ("train.lr=4e-5x", "train.lr", "a positive number"),
    ("train.lr=nan", "train.lr", "a positive number"),
    ("train.lr=inf", "train.lr", "a positive number"),
    ("train.weight_decay=-1", "train.weight_decay", "0 or more"),
    ("train.weight_decay=Infinity", "train.weight_decay", "a number"),
    ("train.backbone_lr_scale=-0.5", "train.backbone_lr_scale", "0 or more"),
    ("train.pct_start=1.5", "train.pct_start", "between 0 and 1"),
    ("train.schedule=cosine", "train.schedule", "onecycle, constant"),
    ("train.amp=on", "train.amp", "auto, bf16, fp16, off"),
    ("loss.alpha=1.01", "loss.alpha", "between 0 and 1"),
    ("loss.alpha=-0.01", "loss.alpha", "between 0 and 1"),
    ("loss.alpha=NaN", "loss.alpha", "a number"),
    ("loss.form=mse", "loss.form", "bce, asl"),
    ("max_entropy.beta=-1", "max_entropy.beta", "0 or more"),
    ("max_entropy.beta=-inf", "max_entropy.beta", "a number"),
    ("max_entropy.form=two", "max_entropy.form", "one_sided, binary"),
    ("threshold=2", "threshold", "between 0 and 1"),
    ("input.size=8", "input.size", "16 or more"),
    ("input.augment=maybe", "input.augment", "true or false"),
    ("input.augment=1", "input.augment", "true or false"),
    ("backbone.output_stride=12", "backbone.output_stride", "8, 16, 32"),
    ("backbone.name=", "backbone.name", "a model of timm such as resnet18"),
    ("backbone.name=hf-hub:somebody/resnet18", "backbone.name", "a model of timm"),
    ("backbone.name=local-dir:/srv/net", "backbone.name", "a model of timm"),
    ("cigcn.width=0", "cigcn.width", "1 or more"),
    ("cigcn.correlation=S->G", "cigcn.correlation", "G->S, Z->S, Z->Z"),
    ("seed=-1", "seed", "0 or more"),
    ("seed=1.5", "seed", "a whole number"),
    ("head=mlp", "head", "ci_gcn, linear"),
    ("labels=all", "labels", "task, seen"),
    ("release_quirks.no_shuffle=2", "release_quirks.no_shuffle", "true or false"),
    ("memory.sampler=random", "memory.per_class=0, memory.total=0", "give one of them"),
    ("memory.sampler=prs", "memory.per_class=0, memory.total=0", "give one of them"),
    ("held_out=1", "held_out=1", "5 holds out a fifth"),
    ("method=icarl", "method", "agcn, agcn-r, csc, csc-r"),
    ("method=", "method", "agcn, agcn-r, csc, csc-r"),
    ("train.epoch=3", "train.epoch", "train.epochs"),
    ("trian.epochs=3", "trian", "train"),
    ("epochs=3", "epochs", "train"),
    ("Seed=3", "Seed", "seed"),
    ("max_entropy.classes.old=3", "max_entropy.classes", "old, all"),
    ("train=3", "train", "a group of epochs"),
    ("cigcn=3", "cigcn", "width"),
    ("train.epochs.x=3", "train.epochs", "a whole number"),
    ("method.x=1", "method", "agcn, agcn-r, csc, csc-r"),
    ("seed=99999999999999999999", "seed", "expected"),
]


@pytest.mark.parametrize(("item", "key", "right"), TYPED, ids=[item for item, _, _ in TYPED])
def test_a_bad_setting_is_refused_by_its_whole_key_with_what_would_be_right(item: str, key: str, right: str):
    message = refused("voc", parse_overrides([item]))
    assert message.startswith((f"{key}=", f"{key}:", f"{key} "))
    assert right in message


GIVEN = [
    ('{"train": {"epochs": null}}', "train.epochs", "a whole number"),
    ('{"train": {"epochs": true}}', "train.epochs", "a whole number"),
    ('{"train": {"epochs": [3]}}', "train.epochs", "a whole number"),
    ('{"train": {"epochs": {"a": 3}}}', "train.epochs", "a whole number"),
    ('{"train": {"epochs": NaN}}', "train.epochs", "a whole number"),
    ('{"train": {"epochs": Infinity}}', "train.epochs", "a whole number"),
    ('{"loss": {"alpha": NaN}}', "loss.alpha", "a number"),
    ('{"loss": {"alpha": -Infinity}}', "loss.alpha", "a number"),
    ('{"loss": {"alpha": false}}', "loss.alpha", "a number"),
    ('{"loss": null}', "loss", "a group of form"),
    ('{"cigcn": []}', "cigcn", "width"),
    ('{"head": ["linear"]}', "head", "ci_gcn, linear"),
    ('{"init": 3}', "init", "text"),
    ('{"cigcn": {"plain": 1}}', "cigcn.plain", "true or false"),
    ('{"method": null}', "method", "agcn, agcn-r, csc, csc-r"),
    ('{"method": ["csc"]}', "method", "agcn, agcn-r, csc, csc-r"),
    ('{"method": {"name": "csc"}}', "method", "agcn, agcn-r, csc, csc-r"),
    ('{"": 1}', "", "method"),
    ("[]", "config", "a JSON object"),
    ('"csc"', "config", "a JSON object"),
    ("method=csc", "config", "JSON"),
    ('{"method": "csc"', "config", "JSON"),
]


@pytest.mark.parametrize(("text", "key", "right"), GIVEN, ids=[text for text, _, _ in GIVEN])
def test_bad_json_is_refused_by_its_whole_key_with_what_would_be_right(text: str, key: str, right: str):
    message = refused("voc", text)
    assert message.startswith((f"{key}=", f"{key}:", f"{key} "))
    assert right in message


@pytest.mark.parametrize(
    "item", ["", "=", "=3", " =3", "train..epochs=3", "train.epochs", "train.epochs 3", "train.epochs:3"]
)
def test_a_word_that_is_not_key_and_value_is_refused_with_an_example(item: str):
    with pytest.raises(BadConfig, match=r"expected key=value, for instance train\.epochs=3") as caught:
        parse_overrides([item])
    assert str(caught.value).startswith(f"--set {item}")


def test_a_value_and_a_group_of_the_same_name_are_refused():
    with pytest.raises(BadConfig, match="'epochs' was already given a value"):
        parse_overrides(["train.epochs=3", "train.epochs.x=3"])


def test_the_last_of_two_values_counts():
    assert parse_overrides(["seed=1", "train.epochs=3", "seed=2"]) == {"seed": "2", "train": {"epochs": "3"}}


def test_a_value_may_have_an_equals_sign_and_spaces_around():
    assert parse_overrides([" init = a=b "]) == {"init": "a=b"}


@pytest.mark.parametrize(("dataset", "beta", "lr_base", "lr"), [("voc", 4e-2, 4e-5, 4e-5), ("coco", 4e-3, 3e-5, 5e-5)])
def test_the_defaults_are_the_numbers_of_the_paper(dataset: str, beta: float, lr_base: float, lr: float):
    values = resolve(dataset).flat()
    expected = {
        "method": "csc",
        "head": "ci_gcn",
        "init": "hub",
        "allow_leaky_init": False,
        "labels": "task",
        "loss.old_labels": "kd",
        "threshold": 0.8,
        "backbone.name": "tresnet_m.miil_in21k",
        "backbone.frozen": False,
        "input.size": 224,
        "input.augment": True,
        "train.epochs": 20,
        "train.batch_size": 64,
        "train.lr_base": lr_base,
        "train.lr": lr,
        "train.weight_decay": 1e-4,
        "train.schedule": "onecycle",
        "train.pct_start": 0.2,
        "cigcn.width": 1024,
        "cigcn.correlation": "G->S",
        "loss.alpha": 0.15,
        "loss.form": "bce",
        "max_entropy.beta": beta,
        "max_entropy.classes": "old",
        "max_entropy.form": "one_sided",
    }
    assert {key: values[key] for key in expected} == expected


@pytest.mark.parametrize(("method", "dataset"), EVERY)
def test_nothing_the_release_does_otherwise_is_on_by_default(method: str, dataset: str):
    quirks = msgspec.structs.asdict(resolve(dataset, {**facts(method), "method": method}).release_quirks)
    assert quirks
    assert set(quirks.values()) == {False}


@pytest.mark.parametrize("dataset", DATASETS)
def test_only_the_upper_bound_sees_labels_of_other_tasks(dataset: str):
    shown = {method: resolve(dataset, {**facts(method), "method": method}).labels for method in methods()}
    assert {method for method, labels in shown.items() if labels == "seen"} == {"joint"}


def test_every_method_is_described_in_one_line():
    assert set(methods()) >= {"csc", "lwf", "finetune", "joint"}
    for description in methods().values():
        assert description
        assert len(description.splitlines()) == 1


def test_the_flat_form_holds_the_same_as_the_json():
    config = resolve("voc")
    assert config.flat() == dict(flatten(json.loads(config.to_json())))


@pytest.mark.parametrize("given", [[], ["krt.of_classes=12"], ["krt.labels_per_image=2"]])
def test_krt_does_not_guess_how_many_labels_an_unknown_data_set_has(given: list[str]):
    with pytest.raises(BadConfig, match=r"data set 'mine'; set krt\.labels_per_image and krt\.of_classes"):
        resolve("mine", parse_overrides(["method=krt-r", *given]))
    assert resolve("voc", {"method": "krt-r"}).flat()["krt.labels_per_image"] == 1.4


@pytest.mark.parametrize(
    ("method", "item"),
    [
        ("derpp", "memory.replay=concat"),
        ("derpp", "memory.sampler=none"),
        ("finetune", "memory.sampler=random"),
        ("oewc", "memory.sampler=herding"),
        ("prs", "loss.old_labels=kd"),
        ("krt-r", "loss.old_labels=masked"),
        ("agcn-r", "head=linear"),
    ],
)
def test_a_value_that_means_nothing_to_a_method_is_refused(method: str, item: str):
    assert refused("voc", parse_overrides([f"method={method}", item])).startswith(item.partition("=")[0])


@pytest.mark.parametrize(
    ("items", "line"),
    [
        (["method=krt", "krt.width=30"], "krt.width=30: expected a multiple of krt.heads=8"),
        (["method=l2p", "l2p.chosen=11"], "l2p.chosen=11: the pool has 10 prompts"),
    ],
)
def test_values_that_contradict_each_other_are_refused(items: list[str], line: str):
    assert refused("voc", parse_overrides(items)) == line


@pytest.mark.parametrize(
    ("method", "unread", "read"),
    [
        ("csc", "memory.rho=0.5", "max_entropy.beta_power=1"),
        ("csc-r", "statistics.weight=2", "memory.weight=2"),
        ("lwf", "max_entropy.form=binary", "train.batch_norm=live"),
        ("joint", "train.lr=1", "train.lr_base=1"),
        ("ridge", "train.epochs=3", "ridge.penalty=3"),
        ("ridge", "input.augment=true", "input.size=32"),
        ("l3a", "train.lr=1", "train.epochs=3"),
        ("agcn", "agcn.width=8", "agcn.relations=1"),
        ("krt head=linear", "krt.width=8", "krt.threshold=0.5"),
        ("lwf loss.old_labels=negative", "loss.alpha=0.5", "loss.form=asl"),
        ("er", "memory.weight=2", "memory.unique=true"),
        ("derpp", "memory.weight=2", "derpp.beta=2"),
        ("agcn-r memory.replay=concat", "memory.unknown=negative", "memory.unique=true"),
        ("agcn-r memory.replay=batch", "memory.rho=1", "memory.unknown=negative"),
        ("l2p memory.sampler=random memory.per_class=2", "memory.unknown=masked", "memory.unique=true"),
        ("csc-r", "memory.rho=1", "memory.batch_size=8"),
        ("prs", "max_entropy.form=binary", "memory.rho=1"),
        ("csc train.schedule=constant", "train.pct_start=0.5", "train.backbone_lr_scale=0.5"),
        ("csc backbone.frozen=true", "train.backbone_lr_scale=0.5", "train.pct_start=0.5"),
        ("l3a", "release_quirks.persist_optimizer=true", "release_quirks.no_shuffle=true"),
    ],
)
def test_what_a_run_never_reads_is_no_part_of_its_identity(method: str, unread: str, read: str):
    plain, inert, other = (
        resolve("voc", parse_overrides([*f"method={method}".split(), *more])).fingerprint()
        for more in ([], [unread], [read])
    )
    assert inert == plain
    assert other != plain
