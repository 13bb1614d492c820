"""Every setting composes, every mistake is one line, and a stranger's configuration executes nothing."""

import ast
import dataclasses
import json
import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarmkit import config as config_module
from swarmkit import network_config, strategy
from swarmkit.compose import load_config, valid_keys
from swarmkit.config import (
    GROUPS,
    MAX_JSON_BYTES,
    Config,
    config_from_json,
    config_to_json,
    config_to_yaml,
    with_own_settings,
)
from swarmkit.errors import ConfigError

ROOT = Path(__file__).parents[3]
CHOICES = sorted(
    (path.parent.name, path.stem) for path in (ROOT / "conf").glob("*/*.yaml") if path.parent.name != "experiment"
)
IMAGES = {("model", "mlp"), ("model", "resnet"), ("model", "vit"), ("data", "digits"), ("data", "fashion_mnist")}


def fitting(group: str, name: str) -> list[str]:
    """Overrides that let a choice stand: its partner of the same kind, and what has no default."""
    overrides = [f"{group}={name}"]
    if (group, name) in IMAGES:
        overrides.append("model=mlp" if group == "data" else "data=digits")
    if (group, name) == ("data", "text"):
        overrides.append("data.paths=[a.txt]")
    if name == "hf":
        overrides.append("data.path=somewhere" if group == "data" else "model.folder=somewhere")
    return overrides


def complaint(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    return str(caught.value)


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_choice_of_every_group_composes(group: str, name: str) -> None:
    config = load_config(fitting(group, name))
    assert isinstance(getattr(config, group), GROUPS[group][name])
    assert group == "network" or getattr(config, group).name == name
    assert config_from_json(config_to_json(config)) == config


def test_every_choice_has_a_file_and_every_file_a_choice() -> None:
    assert sorted((group, name) for group, choices in GROUPS.items() for name in choices) == CHOICES


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_experiment_composes(path: Path) -> None:
    assert load_config([f"+experiment={path.stem}"]) == load_config([f"experiment={path.stem}"])
    assert load_config([f"experiment={path.stem}", "peers=3"]).peers == 3


@pytest.mark.parametrize("override", ["model.config.n_layer=[1]", "model.config=3"])
def test_a_free_form_dictionary_takes_plain_values_only(override: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(override)}: ") as caught:
        load_config(["model=hf", override])
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("step=3", "step: unknown key; did you mean steps? (valid: see `swarmkit config`)"),
        ("strategy.sync.hh=3", "strategy.sync.hh: unknown key; did you mean strategy.sync.h?"),
        ("model.layrs=3", "model.layrs: unknown key; did you mean model.layers?"),
        ("sync.h=3", "sync.h: unknown key; did you mean strategy.sync.h?"),
        ("lr=0.1", "lr: unknown key; did you mean optimizer.lr?"),
        ("optimizer.momentum=0.3", "optimizer.momentum: unknown key here; only optimizer=sgd has it"),
        ("data.paths=[a]", "data.paths: unknown key here; only data=text has it"),
        ("model=gtp", "model=gtp: no such model; did you mean gpt? (valid: gpt, mlp, resnet, vit, hf)"),
        ("model=3", "model=3: no such model; valid: gpt, mlp, resnet, vit, hf"),
        ("compression=topq", "compression=topq: no such compression; did you mean topk?"),
        ("compression.density=1", "compression.density: unknown key here; only compression=topk or randomk has it"),
        ("strategy.eager=true", "strategy.eager: unknown key here; only strategy=diloco has it"),
        ("model.name=mlp", "model.name=mlp: choose with model=mlp"),
        ("+experiment=nope", "experiment=nope: no such experiment"),
        ("steps=x", "steps=x: 'x' is not an integer"),
        ("model.layers=1.5", "model.layers=1.5: '1.5' is not an integer"),
        ("optimizer.lr=fast", "optimizer.lr=fast: 'fast' is not a number"),
        ("optimizer.betas=[a,b]", "optimizer.betas=[a,b]: 'a' is not a number"),
        ("launch.restart=maybe", "launch.restart=maybe: 'maybe' is neither true nor false"),
        ("strategy.sync.rule=qrs", "strategy.sync.rule=qrs: must be one of every, qsr; did you mean qsr?"),
        ("eval.every=null", "eval.every=null: cannot be null"),
        ("eval=3", "eval=3: is a section; set one of its keys instead"),
        ("network.announce=3", "network.announce=3: must be a list, as [a,b]"),
        ("name=[1]", "name=[1]: a text is wanted, not a list"),
        ("steps=1,2", "steps=1,2: one value is wanted"),
        ("steps=[1", "steps=[1: cannot be read"),
        ("out=~/x", "out=~/x: cannot be read; put a value with special characters in quotes"),
        ("steps", "steps: not KEY=VALUE"),
        ("", ": not KEY=VALUE"),
        ("+new=1", "new: unknown key"),
        ("++steps=2", "++steps=2: steps exists already; write steps=2"),
        ("~steps", "~steps: no setting can be removed"),
        ("hydra.run.dir=x", "hydra.run.dir: unknown key"),
        ("name=${nope}", "name=${nope}: there is no key nope to take the value from"),
        ("name=${oc.env:SWARMKIT_NO_SUCH}", "name=${oc.env:SWARMKIT_NO_SUCH}: "),
        ("strategy.sync.h=0", "strategy.sync.h=0: H must be at least 1 inner step"),
        ("strategy.sync.h=4000", "strategy.sync.h=4000: longer than the whole training (steps=240)"),
        ("strategy.sync.rule=qsr", "strategy.sync.rule=qsr: needs strategy.sync.alpha"),
        ("strategy.sync.alpha=0.1", "strategy.sync.alpha=0.1: only strategy.sync.rule=qsr uses it"),
        ("stages=9", "stages=9: the model has only 4 layers (model.layers)"),
        ("stages=2", "stages=2: pipelines are not part of this version"),
        ("peers=0", "peers=0: must be at least 1"),
        ("optimizer.lr=nan", "optimizer.lr=nan: must be positive"),
        ("optimizer.lr=inf", "optimizer.lr=inf: must be positive and finite"),
        ("optimizer.clip=nan", "optimizer.clip=nan: must be at least 0"),
        ("optimizer.warmup_steps=400", "optimizer.warmup_steps=400: must be below steps=240"),
        ("network.min_peers=9", "network.min_peers=9: more than peers=4"),
        ("network.listen=nowhere", "network.listen='nowhere': must be host:port"),
        ("network.silence_s=40", "network.silence_s=40.0: must be below network.round_timeout_s=30.0"),
        ("name='a b'", "name='a b': letters, digits, - and _ only"),
        ("name=../up", "name='../up': letters, digits, - and _ only"),
        ("device=gpu", "device='gpu': must be auto, cpu, cuda, cuda:N or mps"),
        ("model=mlp", "model=mlp: it learns from images, data=stdlib has tokens"),
        ("data=digits", "model=gpt: it learns from tokens, data=digits has images; use model=mlp, resnet or vit"),
        ("strategy.offload=foo", "strategy.offload='foo': must be cpu, cuda, cuda:N or mps"),
        ("network.initial_peers=[garbage]", "network.initial_peers: 'garbage' is not an address of a peer"),
        ("network.announce=[garbage]", "network.announce='garbage': must look like /ip4/203.0.113.5/tcp/31337"),
        ("network.listen='foo bar:80'", "network.listen='foo bar:80': must be host:port"),
        ("log.prometheus_port=70000", "log.prometheus_port=70000: not a port"),
    ],
)
def test_a_mistake_is_one_line_with_key_value_and_reason(override: str, message: str) -> None:
    said = complaint(override)
    assert said.startswith(message)
    assert len(said.splitlines()) == 1
    assert "Error" not in said
    assert "_type" not in said


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy=demo", "compression=int8"], "compression=int8: strategy=demo sends DCT coefficients"),
        (["strategy=demo", "strategy.outer_lr=1"], "strategy.outer_lr: unknown key here; only strategy=diloco or co2"),
        (["strategy=demo", "strategy.k=0"], "strategy.k=0: must be at least 1"),
        (["strategy=diloco", "strategy.eager=soon"], "strategy.eager=soon: must be true, false or delayed"),
        (
            ["strategy=diloco", "strategy.eager=true", "strategy.mixing=0.5"],
            "strategy.overlap_steps=0, strategy.mixing=0.5",
        ),
        (["strategy=diloco", "strategy.fragments=20"], "strategy.fragments=20: more than a window has steps"),
        (
            ["strategy=diloco", "strategy.overlap_steps=16"],
            "strategy.overlap_steps=16: must be below",
        ),
        (
            ["strategy=co2", "strategy.penalty=0.5"],
            "strategy.penalty=0.5: must be gap, a number",
        ),
        (["strategy=co2", "strategy.keep_local=true", "strategy.overlap=false"], "strategy.keep_local=true: without"),
        (["compression=int8", "compression.lgreco.period=4"], "compression.lgreco.period: unknown key"),
        (["compression=int4", "compression.block=12"], "compression.block=12: a multiple of 8"),
        (["compression=topk", "compression.density=0"], "compression.density=0.0: a share, above 0 and at most 1"),
        (["compression=randomk", "compression.error_feedback=true"], "compression.error_feedback=true: scaled up"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(overrides: list[str], message: str) -> None:
    said = complaint(*overrides)
    assert said.startswith(message)
    assert len(said.splitlines()) == 1


def test_all_problems_are_told_at_once() -> None:
    said = complaint("peers=0", "strategy.sync.h=0", "optimizer.lr=-1", "eval.batches=0").splitlines()
    assert sorted(line.partition(":")[0] for line in said) == [
        "eval.batches=0",
        "optimizer.lr=-1.0",
        "peers=0",
        "strategy.sync.h=0",
    ]
    assert len(complaint("stepz=1", "model=gtp", "~seed").splitlines()) == 3


def test_an_interpolation_of_another_key_is_filled_in() -> None:
    assert load_config(["steps=${peers}00", "name=of-${seed}"]).steps == 400


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_a_free_form_dictionary_takes_keys_of_its_own(sign: str) -> None:
    config = load_config(["model=hf", f"{sign}model.config.n_layer=2", "model.config.tie_word_embeddings=true"])
    assert json.loads(config_to_json(config))["model"]["config"] == {"n_layer": 2, "tie_word_embeddings": True}
    assert load_config(["model=hf", "model.config={n_layer:2}"]).model != load_config(["model=hf"]).model


def test_valid_keys_follow_the_choices() -> None:
    assert "optimizer.momentum" in set(valid_keys(["optimizer=sgd"]))
    assert "optimizer.momentum" not in set(valid_keys())


def test_yaml_names_every_key() -> None:
    text = config_to_yaml(load_config())
    assert all(f"{key.rpartition('.')[2]}:" in text for key in valid_keys())


# -- JSON, which comes from strangers ----------------------------------------------------------------------------------


@st.composite
def overrides(draw: st.DrawFn) -> list[str]:
    chosen = [
        f"steps={draw(st.integers(1000, 10**9))}",
        f"seed={draw(st.integers(0, 2**40))}",
        f"optimizer={draw(st.sampled_from(['adamw', 'sgd']))}",
        f"optimizer.lr={draw(st.floats(1e-9, 10))!r}",
        f"model.context={draw(st.integers(1, 4096))}",
        f"data.split={draw(st.sampled_from(['iid', 'domain', 'dirichlet']))}",
        f"strategy={draw(st.sampled_from(['allreduce', 'local_sgd', 'diloco']))}",
        f"network={draw(st.sampled_from(['local', 'wan']))}",
        f"network.announce={json.dumps(draw(st.lists(st.sampled_from(['/ip4/1.2.3.4/tcp/5', '/dns/a.b/tcp/6']))))}",
    ]
    if "strategy=allreduce" not in chosen:
        chosen.append(f"strategy.sync.h={draw(st.integers(1, 1000))}")
    return chosen


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(overrides())
def test_json_holds_everything(chosen: list[str]) -> None:
    config = load_config(chosen)
    assert config_from_json(config_to_json(config)) == config


@cache
def default_json() -> str:
    return config_to_json(Config())


def changed(**changes: object) -> str:
    """A good configuration with some keys replaced; a double underscore stands for a dot."""
    values = json.loads(default_json())
    for key, value in changes.items():
        *sections, last = key.split("__")
        place = values
        for section in sections:
            place = place[section]
        place[last] = value
    return json.dumps(values)


HOSTILE = {
    "nothing": "",
    "not JSON": "{",
    "a list": "[]",
    "a number": "3",
    "null": "null",
    "no keys": "{}",
    "NaN peers": '{"peers": NaN}',
    "unknown key": changed(surprise=1),
    "unknown inner key": changed(model__surprise=1),
    "unknown model": changed(model__name="__import__"),
    "model of a wrong type": changed(model__name=["gpt"]),
    "model an unhashable name": changed(model__name={"a": 1}),
    "model a text": changed(model="gpt"),
    "model null": changed(model=None),
    "model missing its name": changed(model={}),
    "section a number": changed(eval=3),
    "section null": changed(eval=None),
    "wrong type": changed(steps="many"),
    "wrong inner type": changed(strategy__sync__h=[1]),
    "wrong enum": changed(network__transport="telepathy"),
    "null number": changed(steps=None),
    "missing mark": changed(steps="???"),
    "missing mark inside": changed(model__layers="???"),
    "missing model": changed(model="???"),
    "H below 1": changed(strategy__sync__h=0),
    "huge number": changed(steps=10**400),
    "negative": changed(steps=-1),
    "target": changed(model___target_="os.system"),
    "interpolation": changed(name="${oc.env:HOME}"),
    "interpolation in a key": changed(**{"${oc.env:HOME}": 1}),
    "escaped interpolation": changed(name="@{oc.env:HOME}").replace("@{", "\\u0024{"),
    "escaped brace": changed(out="$@oc.env:HOME}").replace("@", "\\u007b"),
    "too long": changed(name="x" * MAX_JSON_BYTES),
    "deep": "[" * 60_000 + "]" * 60_000,
    "deep object": '{"model":' * 10_000 + "1" + "}" * 10_000,
    "deep inside": changed(network__announce="@").replace('"@"', "[" * 500 + "]" * 500),
    "number of many digits": '{"steps": ' + "9" * 100_000 + "}",
    "path in the name": changed(name="../../etc"),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_bad_published_configuration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_json(text)
    assert len(str(caught.value)) < 1000


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["???", "${a}"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(valid_keys())), JSON_VALUES)
def test_any_value_at_any_key_gives_a_configuration_or_a_config_error(key: str, value: object) -> None:
    try:
        config = config_from_json(changed(**{key.replace(".", "__"): value}))
    except ConfigError:
        return
    assert isinstance(config, Config)


def test_a_list_where_numbers_belong_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="optimizer: "):
        config_from_json(changed(optimizer__milestones=[[]]))


def test_environment_variables_do_not_leak_through_a_published_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    with pytest.raises(ConfigError) as caught:
        config_from_json(changed(out="${oc.env:SECRET}"))
    assert "hunter2" not in str(caught.value)


# -- one's own settings ------------------------------------------------------------------------------------------------


def test_own_settings_change_only_what_is_allowed() -> None:
    config = Config(seed=7)
    own = with_own_settings(config, ["eval.batches=3", "batch_size=2"], ("eval", "batch_size"))
    assert (own.eval.batches, own.batch_size, own.seed) == (3, 2, 7)
    assert config.eval.batches == 16


@pytest.mark.parametrize(
    "override", ["steps=3", "eval", "evaluation.batches=3", "batch_size.x=1", "+steps=1", "~eval=1"]
)
def test_own_settings_refuse_the_rest(override: str) -> None:
    with pytest.raises(ConfigError):
        with_own_settings(Config(), [override], ("eval", "batch_size"))


@pytest.mark.parametrize("override", ["eval.batches=x", "eval.nope=1", "eval.batches=0", "eval=3", "batch_size=[1"])
def test_own_settings_are_checked(override: str) -> None:
    with pytest.raises(ConfigError):
        with_own_settings(Config(), [override], ("eval", "batch_size"))


# -- documentation -----------------------------------------------------------------------------------------------------


def dataclass_fields() -> list[tuple[str, str]]:
    """Every field of every configuration dataclass that has no comment on its line."""
    missing = []
    for module in (config_module, strategy, network_config):
        source = Path(str(module.__file__)).read_text()
        lines = source.splitlines()
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and dataclasses.is_dataclass(getattr(module, node.name)):
                assert ast.get_docstring(node), node.name
                for entry in node.body:
                    if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                        missing.append((f"{node.name}.{entry.target.id}", lines[entry.lineno - 1]))
    return missing


def test_every_setting_says_what_it_is() -> None:
    # A name set by the choice of its group, and a section, whose class has a docstring, explain themselves.
    undocumented = [
        name
        for name, line in dataclass_fields()
        if "#" not in line and not name.endswith(".name") and "Config = field(" not in line
    ]
    assert not undocumented
