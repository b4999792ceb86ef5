import json
from dataclasses import replace
from typing import Any

import pytest

from scalerl.errors import InputError
from scalerl.kinds import kind_of
from scalerl.rl.algo.curriculum import NoPositiveResampling
from scalerl.rl.algo.length import ForcedInterruption, NoLengthControl
from scalerl.rl.algo.loss import Cispo, Dapo
from scalerl.rl.config.optimiser import AdamW
from scalerl.rl.config.recipe import Recipe, from_dict, load_recipe
from scalerl.rl.config.settings import BatchSize, FlopsBudget, Steps
from scalerl.rl.tasks.chain import Chain

LEAST = """
model = "tiny"
task = {kind = "chain", k_max = 6}
budget = {kind = "steps", amount = 40}
"""


@pytest.fixture
def write(tmp_path):
    """A function that writes a recipe of the least content, and more."""

    def write_toml(more="", base=LEAST):
        path = tmp_path / "mine.toml"
        path.write_text(base + more)
        return path

    return write_toml


def test_what_is_not_said_takes_its_default(write):
    recipe = load_recipe(write("[loss]\nmax_ratio = 4.0\n[batch]\nprompts = 8\n"))
    assert recipe.task == Chain(k_max=6)
    assert recipe.budget == Steps(40)
    assert recipe.loss == Cispo(max_ratio=4.0)
    assert recipe.batch == BatchSize(prompts=8, samples=16)
    untouched = Recipe(model="tiny", task=Chain(k_max=6), budget=Steps(40))
    assert (recipe.schedule, recipe.length, recipe.optimiser) == (
        untouched.schedule,
        untouched.length,
        untouched.optimiser,
    )


def test_the_defaults_are_the_papers():
    # arXiv 2510.13786, section 2 and appendix: PipelineRL-8, 48 x 16, lr 5e-7 after 100 steps of warm-up,
    # eps 1e-15, decay 0.01, interruption in [10k, 12k] of a 12,288-token budget, 16,384 tokens of context.
    recipe = Recipe(model="tiny", task=Chain(), budget=Steps(1))
    assert recipe.schedule.k == 8
    assert recipe.schedule.in_flight_limit(recipe.batch.prompts) == 9 * 48
    assert recipe.batch.prompts * recipe.batch.samples == 768
    assert recipe.optimiser == AdamW(lr=5e-7, warmup_steps=100, eps=1e-15, weight_decay=0.01)
    assert isinstance(recipe.length, ForcedInterruption)
    assert (recipe.length.low, recipe.length.high) == (10 * 1024, 12 * 1024)
    assert recipe.context.prompt + recipe.context.thinking + recipe.context.answer == 16384
    assert recipe.fp32_logits == "both"
    assert recipe.zero_variance == "drop"
    assert recipe.curriculum == NoPositiveResampling()


def test_variants_are_chosen_by_kind(write):
    recipe = load_recipe(
        write(
            '[length]\nkind = "none"\n[budget]\nkind = "flops"\namount = 1e15\n',
            'model = "tiny"\ntask = {kind = "chain"}\n',
        )
    )
    assert recipe.length == NoLengthControl()
    assert recipe.budget == FlopsBudget(1e15)


def test_a_resolved_recipe_goes_through_json_and_back(write):
    recipe = load_recipe(write('[length]\nkind = "forced_interruption"\nlow = 5\nhigh = 9\n'))
    resolved = json.loads(json.dumps(recipe.to_dict()))
    assert from_dict(resolved) == recipe
    assert resolved["optimiser"]["betas"] == [0.9, 0.95]
    assert resolved["length"]["kind"] == "forced_interruption"


def test_overrides_come_last_and_reach_nested_keys(write):
    overrides = [
        "loss.max_ratio=8",
        "seed = 3",
        "name=mine",
        'length={kind = "none"}',
        "optimiser.betas=[0.8, 0.9]",
    ]
    recipe = load_recipe(write("[loss]\nmax_ratio = 4.0\n"), overrides)
    assert (recipe.loss, recipe.seed, recipe.name) == (Cispo(max_ratio=8.0), 3, "mine")
    assert recipe.length == NoLengthControl()
    assert recipe.optimiser.betas == (0.8, 0.9)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("tempurature = 1\n", r"unknown key 'tempurature'; did you mean 'temperature'\?"),
        (
            "[optimiser]\nlearning_rate = 1\n",
            "unknown key 'optimiser.learning_rate'; ",
        ),
        ("[loss]\nmax_rati = 4\n", r"unknown key 'loss.max_rati'; did you mean 'loss.max_ratio'\?"),
        ("[optimizer]\nlr = 1\n", r"unknown key 'optimizer'; did you mean 'optimiser'\?"),
        ("zzzz = 1\n", "unknown key 'zzzz'; the keys here are model, task, budget"),
        (
            '[length]\nkind = "none"\nlow = 4\n',
            "unknown key 'length.low'; with length.kind = 'none' the keys are kind",
        ),
        ("[length]\nlow = 9\nhigh = 4\n", "length: low and high must satisfy"),  # of the default kind
        ("[length]\nhigh = 12289\n", r"length.high: 12289 exceeds context.thinking \(12288\)"),
        ('[length]\nphrase = "Stop."\n', "length.phrase: must end with '</think>'"),
        (
            '[length]\nkind = "penalty"\n',
            r"length.kind: no kind 'penalty'; did you mean 'length_penalty'\? the kinds are forced",
        ),
        (
            '[loss]\nkind = "ppo"\n',
            "loss.kind: no kind 'ppo'; the kinds are cispo, dapo, decoupled, grpo, gspo, reinforce, or",
        ),
        ('[loss]\nkind = "dapo"\nlength_normalised = true\n', "unknown key 'loss.length_normalised'"),
        ('[length]\nkind = ["none"]\n', "length"),
        (
            'zero_variance = "dropped"\n',
            "zero_variance: found 'dropped', expected 'drop', 'keep' or 'resample'",
        ),
        ("temperature = 0\n", "temperature must be between 0.01 and 100"),
        ("temperature = nan\n", "temperature must be between 0.01 and 100"),
        ("top_p = 0.0\n", "top_p must be above 0 and at most 1, which samples from all tokens"),
        ("top_p = 1.01\n", "top_p must be above 0 and at most 1, which samples from all tokens"),
        ("top_k = -1\n", "top_k must be at least 0, which samples from all tokens"),
        (
            'top_p = 0.95\nloss.kind = "gspo"\n',
            "ratios begin at 0.95, and loss.min_ratio",
        ),
        ("[loss]\nmax_ratio = -1\n", "loss: max_ratio must be positive"),
        ("[batch]\nsamples = 1\n", "batch: samples must be at least 2"),
        ("[schedule]\nk = -1\n", "schedule: k must be between 0 and 1000"),
        ("[curriculum]\nthreshold = 1.5\n", r"curriculum: threshold must be in \(0, 1\]"),
        ('[length]\nkind = "forced_interruption"\nlow = 9\nhigh = 5\n', "length: low and high must satisfy"),
        ('[batch]\nprompts = "many"\n', "batch.prompts: expected a whole number, found 'many'"),
        ("[batch]\nprompts = 2.5\n", r"batch.prompts: expected a whole number, found 2\.5"),
        ("batch = 4\n", "batch: .*found 4"),
        ("decode_slots = [1]\n", r"decode_slots: expected a whole number, found \[1\]"),
        ("= 3\n", "not TOML"),
    ],
)
def test_a_mistake_is_named_in_one_line(write, more, message):
    path = write(more)
    with pytest.raises(InputError, match=message) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ('model = "tiny"\ntask = {kind = "chain"}\n', "missing key 'budget'$"),
        ('task = {kind = "chain"}\nbudget = {kind = "steps", amount = 1}\n', "missing key 'model'$"),
        (
            'model = "tiny"\ntask = {kind = "chain"}\nbudget = {kind = "steps"}\n',
            "missing key 'budget.amount'$",
        ),
        ('model = "tiny"\ntask = {kind = "chain"}\nbudget = {amount = 4}\n', "missing key 'budget.kind'"),
        (
            'model = "tiny"\ntask = {kind = "chain"}\nbudget = {kind = "steps", amount = 0}\n',
            "budget: amount must be positive",
        ),
        (
            'model = "tiny"\ntask = {kind = "chain", k_max = 50}\nbudget = {kind = "steps", amount = 1}\n',
            "task: k_max must be",
        ),
    ],
)
def test_what_is_missing_or_out_of_range_is_named_by_its_key(write, base, message):
    with pytest.raises(InputError, match=message) as caught:
        load_recipe(write(base=base))
    assert "\n" not in str(caught.value)


def test_another_kind_brings_its_own_parameters():
    assert load_recipe("minimax_m1", ["loss.kind=dapo"]).loss == Dapo()
    assert load_recipe("minimax_m1", ["loss.min_ratio=0.7", "loss.kind=dapo"]).loss == Dapo(min_ratio=0.7)
    assert load_recipe("minimax_m1", ["loss.kind=cispo"]).loss == Cispo(max_ratio=5.0)
    assert load_recipe("demo", ["length.kind=none"]).length == NoLengthControl()
    with pytest.raises(InputError, match=r"missing key 'budget\.amount'"):  # another unit
        load_recipe("demo", ["budget.kind=steps"])


def test_a_folder_that_is_no_run_does_not_hide_the_recipe_of_its_name(tmp_path, monkeypatch):
    # `scalerl study STUDY -o smollm2` makes such a folder, and is run again from the same place.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert load_recipe("smollm2").model == "smollm2"
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match=r"other: no config.json in this folder"):
        load_recipe("other")


def test_a_recipe_is_what_it_says_over_its_base(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text('base = "minimax_m1"\nseed = 3\n[optimiser]\nlr = 2e-5\n[loss]\nkind = "dapo"\n')
    found, base = load_recipe(own, ["batch.prompts=4"]), load_recipe("minimax_m1", ["batch.prompts=4"])
    assert found.loss == Dapo()  # of another kind, so nothing of the base's loss
    assert found == replace(base, seed=3, loss=Dapo(), optimiser=replace(base.optimiser, lr=2e-5))
    for base, message in (
        ('"own"', r"own\.toml: own: no such file, and no recipe"),
        ("3", r"own\.toml: base must be the name of a recipe"),
        ('"scalerl"\nloss = 3\n#', "loss"),
    ):
        own.write_text(f"base = {base}\n")
        with pytest.raises(InputError, match=message):
            load_recipe(own)


def test_a_base_may_have_a_base_but_not_itself(tmp_path):
    own, two = tmp_path / "own.toml", tmp_path / "two.toml"
    own.write_text('base = "smollm2_lora"\nseed = 3\ntemperature = 0.5\n')
    two.write_text(f'base = "{own}"\nseed = 4\n')
    assert load_recipe(two) == replace(load_recipe("smollm2_lora"), seed=4, temperature=0.5)
    own.write_text(f'base = "{two}"\n')
    with pytest.raises(
        InputError, match=r"two\.toml: .*own\.toml: base '.*two\.toml' has this one as its base"
    ):
        load_recipe(two)
    own.write_text('base = "demo"\nsede = 3\n')
    with pytest.raises(InputError, match="unknown key 'sede'"):
        load_recipe(two)


def test_smollm2_with_lora_is_smollm2_but_for_the_adapters():
    found, base = load_recipe("smollm2_lora"), load_recipe("smollm2")
    same = replace(base, name=found.name, lora=found.lora, optimiser=found.optimiser)
    assert found == same
    assert found.lora.rank > 0


def test_a_recipe_that_is_not_there_names_those_that_are():
    with pytest.raises(
        InputError, match=r"demmo: no such file, and no recipe of that name \(there are: .*demo"
    ):
        load_recipe("demmo")


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "latin.toml"
    path.write_bytes('model = "caf\xe9"'.encode("latin-1"))
    with pytest.raises(InputError, match="not TOML"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss", "--set loss: expected key=value"),
        ("model.size=3", "--set: 'model' is a value, not a table"),
        ("loss.max_ration=3", "unknown key 'loss.max_ration'; did you mean 'loss.max_ratio'"),
    ],
)
def test_a_bad_override_is_named(write, override, message):
    with pytest.raises(InputError, match=message):
        load_recipe(write(), [override])


def test_a_key_is_suggested_of_the_chosen_kind_alone():
    with pytest.raises(InputError, match=r"unknown key 'task.too_lon'; the keys here are"):
        load_recipe("demo", ["task.too_lon=1"])  # task.too_long is a data set's


def test_the_recipes_of_the_package_resolve():
    assert kind_of(load_recipe("demo", ["model=x"]).task) == "chain"


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("optimiser.betas=[2, 3]", "betas in [0, 1)"),
        ("optimiser.eps=-1", "eps must be positive"),
        ("optimiser.lr=inf", "positive, and at most 1000"),
        ("budget.amount=inf", "positive and finite"),
        ("seed=-1", "seed must be at least 0"),
        ("cluster.address=head", 'cluster: address must be "auto", "local" or HOST:PORT'),
        (f"learner.chunk={2**63}", "learner: chunk must be below 2**63"),
        ("evaluation.seed=-1", "evaluation: seed must be at least 0"),
        ("health.logp_gap.alarm=inf", "thresholds must be positive and finite"),
        ("health.logp_gap.window=0", "window must be 1 to 100"),
        ("health.logp_gap.window=500", "window must be 1 to 100"),
    ],
)
def test_values_that_only_a_run_would_trip_over_are_refused(override, complaint):
    with pytest.raises(InputError) as caught:
        load_recipe("demo", [override])
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_recipe_of_a_run_folder_is_run_again(write, tmp_path):
    recipe = load_recipe(write('[loss]\nkind = "dapo"\nmax_ratio = 1.3\n'))
    (tmp_path / "run").mkdir()
    config = tmp_path / "run" / "config.json"
    config.write_text(json.dumps({"name": "x", "recipe": recipe.to_dict()}))
    assert load_recipe(tmp_path / "run") == recipe
    assert load_recipe(tmp_path / "run", ["seed=7", "loss.min_ratio=0.7"]).loss == Dapo(
        min_ratio=0.7, max_ratio=1.3
    )
    for text in ("{", "[]", "{}", '{"recipe": 3}'):
        config.write_text(text)
        with pytest.raises(
            InputError, match=r"config\.json: (holds no recipe|not JSON|expected one JSON object)"
        ):
            load_recipe(tmp_path / "run")


PUBLISHED = ["scalerl", "deepseek_grpo", "qwen25_dapo", "magistral", "minimax_m1"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_recipes_load_and_resolve(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert load_recipe(name, ["loss.max_ratio=4"]).to_dict()["loss"]["max_ratio"] == 4


def test_the_published_recipes_are_what_the_paper_compares():
    recipes = {name: load_recipe(name) for name in PUBLISHED}
    rows = {
        name: (
            kind_of(r.loss),
            r.schedule.kind,
            kind_of(r.averaging),
            kind_of(r.advantage),
            r.batch.prompts * r.batch.samples,
        )
        for name, r in recipes.items()
    }
    assert rows == {
        "scalerl": ("cispo", "pipeline_rl", "prompt", "batch_std", 768),
        "deepseek_grpo": ("grpo", "off_policy", "sample", "prompt_std", 768),
        "qwen25_dapo": ("dapo", "off_policy", "prompt", "prompt_std", 1280),
        "magistral": ("dapo", "pipeline_rl", "prompt", "prompt_std", 1280),
        "minimax_m1": ("cispo", "off_policy", "prompt", "prompt_std", 1280),
    }
    assert [r.fp32_logits for r in recipes.values()] == ["both", "neither", "neither", "neither", "both"]


@pytest.mark.parametrize(
    ("loss", "averaging", "advantage"),
    [
        ("cispo", "prompt", "batch_std"),
        ("reinforce", "prompt", "batch_std"),
        ("grpo", "sample", "prompt_std"),
        ("dapo", "prompt", "prompt_std"),
        ("gspo", "sample", "prompt_std"),
    ],
)
def test_a_loss_brings_the_averaging_and_the_advantage_of_its_paper(loss, averaging, advantage):
    recipe: Any = load_recipe("scalerl", [f"loss.kind={loss}"])
    assert (recipe.averaging.kind, recipe.advantage.kind) == (averaging, advantage)
    shown = recipe.to_json()  # as config.json has it
    assert (shown["averaging"]["kind"], shown["advantage"]["kind"]) == (averaging, advantage)
    assert from_dict(shown) == recipe
    # What the recipe sets stays, and so does the rest of it.
    kept: Any = load_recipe("scalerl", [f"loss.kind={loss}", "averaging.kind=token", "advantage.kind=none"])
    assert (kept.averaging.kind, kept.advantage.kind) == ("token", "none")
    assert kept.loss == recipe.loss
    assert recipe == replace(
        load_recipe("scalerl"), loss=recipe.loss, averaging=recipe.averaging, advantage=recipe.advantage
    )
