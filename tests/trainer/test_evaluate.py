"""Prompts, figures and tables of an evaluation; and whole evaluations of the demo's target."""

import json
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from trainer import decode, equality, evaluate, report
from trainer.config import load
from trainer.errors import TrainerError
from trainer.models import build
from trainer.prompts import Prompt, load_prompts

DEMO = Path(__file__).parents[2] / "trainer" / "configs" / "demo.yaml"
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if quiet %} quiet{% endif %}{% endif %}"
)
WORDS = ["?", "[", "]", "user", "assistant", "system", "hello", "there", "quiet"]


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template)


def text_of(tokens: list[int]) -> str:
    return " ".join(WORDS[token] for token in tokens)


def prompts_in(path: Path, content: object, template: str | None = TEMPLATE, **arguments) -> list[Prompt]:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return load_prompts(path, len(WORDS), tokenizer=lambda: tokenizer(template), template=arguments)


def test_prompts_come_as_tokens_messages_or_text(tmp_path):
    path = tmp_path / "prompts"
    conversation = [{"role": "system", "content": "there"}, {"role": "user", "content": "hello"}]
    answered = [*conversation, {"role": "assistant", "content": "hello there"}]
    records = [
        {"tokens": [6, 7], "domain": "code"},
        {"messages": conversation},
        {"messages": answered, "domain": "chat"},
        {"prompt": "hello"},
    ]
    prompts = prompts_in(path, records)
    assert prompts[0] == Prompt(tokens=[6, 7], domain="code")
    assert text_of(prompts[1].tokens) == "[ system ] there [ user ] hello [ assistant ]"
    assert prompts[2] == Prompt(tokens=prompts[1].tokens, domain="chat")  # the answer is what is to be generated
    assert text_of(prompts[3].tokens) == "[ user ] hello [ assistant ]" and prompts[3].domain == ""
    lines = "\n\n".join(json.dumps(record) for record in records) + "\n"
    assert prompts_in(path, lines) == prompts
    assert text_of(prompts_in(path, records[3:], quiet=True)[0].tokens).endswith("[ assistant ] quiet")
    assert text_of(prompts_in(path, records[3:], None)[0].tokens) == "hello"  # a base model continues a text


def test_a_text_begins_with_one_begin_token(tmp_path):
    words = tokenizer(None)
    words.bos_token = "quiet"
    words._tokenizer.post_processor = processors.TemplateProcessing(
        single="quiet $A", special_tokens=[("quiet", WORDS.index("quiet"))]
    )
    (tmp_path / "prompts").write_text(json.dumps([{"prompt": "hello there"}, {"prompt": "quiet hello there"}]))
    without, with_begin = load_prompts(tmp_path / "prompts", len(WORDS), tokenizer=lambda: words)
    assert text_of(without.tokens) == text_of(with_begin.tokens) == "quiet hello there"


def test_tools_stand_in_the_prompt(tmp_path):
    template = "{% if tools %}{{ tools[0]['name'] }} {% endif %}" + TEMPLATE
    message = {"messages": [{"role": "user", "content": "hello"}]}
    (prompt,) = prompts_in(tmp_path / "prompts", [{**message, "tools": [{"name": "there"}]}], template)
    assert text_of(prompt.tokens) == "there [ user ] hello [ assistant ]"
    with pytest.raises(TrainerError, match="tools that are no list"):
        prompts_in(tmp_path / "prompts", [{**message, "tools": "there"}], template)


def test_half_a_character_is_told(tmp_path):
    with pytest.raises(TrainerError, match="prompt 0 is refused by the tokenizer"):
        prompts_in(tmp_path / "prompts", '[{"prompt": "\\ud800"}]', None)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[", "must be a JSON list"),
        ("[]", "no prompts"),
        ("", "no prompts"),
        ([{"tokens": [1]}, {"tokens": [3, 99]}], "prompt 1 is empty or has tokens outside the vocabulary of 9"),
        ([{"tokens": []}], "prompt 0 is empty"),
        ([{"tokens": [1.5]}], "prompt 0 has tokens that are not a list of integers"),
        ([{"tokens": [True]}], "prompt 0 has tokens"),
        ([[1, 2]], "prompt 0 must be an object with one of tokens, messages, prompt"),
        ([{"text": "hello"}], "prompt 0 has none of tokens, messages, prompt"),
        ([{"tokens": [1], "domain": 3}], "prompt 0 has a domain that is no string"),
        ('{"tokens": [1]}\n\n{"tokens": [1]', "line 3 is not JSON"),
        ('{"tokens": [1]}\n{"messages": "hello"}', "line 2 has messages that are not a list"),
        ('{"messages": [{"role": "assistant", "content": "hello"}]}', "line 1 has no message to answer"),
    ],
)
def test_wrong_prompts_are_named_in_one_sentence(tmp_path, content, words):
    with pytest.raises(TrainerError, match=words) as error:
        prompts_in(tmp_path / "prompts.json", content)
    assert "prompts.json" in str(error.value) and "\n" not in str(error.value)


def test_wrong_templates_are_told(tmp_path):
    messages = [{"messages": [{"role": "user", "content": "hello"}]}]
    with pytest.raises(TrainerError, match="prompt 0 has messages, but the target's tokenizer has no chat template"):
        prompts_in(tmp_path / "p", messages, None)
    with pytest.raises(TrainerError, match=r"refused by the chat template .*no such role"):
        prompts_in(tmp_path / "p", messages, "{{ raise_exception('no such role') }}")
    with pytest.raises(TrainerError, match="cannot be read"):
        load_prompts(tmp_path / "missing", 9)


def test_repeated_share_counts_what_occurred_before():
    assert evaluate.repeated_share([[1, 2] * 6], n=2) == (9, 11)
    assert evaluate.repeated_share([list(range(30))]) == (0, 23)


def test_acceptance_by_position_and_domain_is_counted_from_rounds():
    rounds = torch.tensor([[1, 2, 0], [0, 1, 4], [2, 0, 0]])
    decoded = decode.Decoded(tokens=[[1, 2], [1, 2, 3], [1]], seconds=2.0, rounds=rounds)
    figures = evaluate.figures_of(decoded, ["a", "b", "a"], "match")
    assert figures["rounds"] == 10 and figures["tau"] == (3 * 1 + 3 * 2 + 4 * 3) / 10
    assert figures["accepted_share"] == [0.7, 0.4] and figures["accepted_given_previous"] == [0.7, 4 / 7]
    # tau is one token and the drafts accepted at each position
    assert math.isclose(figures["tau"], 1 + sum(figures["accepted_share"]))
    assert figures["domains"]["a"] == {"prompts": 2, "rounds": 5, "tau": 7 / 5}
    assert figures["domains"]["b"] == {"prompts": 1, "rounds": 5, "tau": 14 / 5}
    assert figures["tokens_per_second"] == 3 / 2.0  # the first token of each prompt comes before the clock
    nothing = evaluate.figures_of(decode.Decoded(tokens=[[1]], seconds=0.0, rounds=rounds[:1] * 0), [""], "match")
    assert nothing["accepted_share"] == [None, None] and "domains" not in nothing


def test_a_divergence_is_judged_by_the_gap_where_it_begins():
    plain = decode.Decoded(
        tokens=[[1, 2, 3], [4, 5], [6, 7, 8], [9]], seconds=1.0, gaps=[[2.0, 0.1, 3.0], [1.0, 1.0], [2.0] * 3, [1.0]]
    )
    drafted = decode.Decoded(tokens=[[1, 9, 7], [4, 5], [6, 7], [8]], seconds=1.0)
    found = equality.divergences(plain, drafted)
    assert [(d.prompt, d.position, d.gap) for d in found] == [(0, 1, 0.1), (2, 2, math.inf), (3, 0, 1.0)]
    assert [d.real(torch.bfloat16) for d in found] == [False, True, True]
    assert [d.real(torch.float32) for d in found] == [True, True, True]
    summary = equality.summary(found, torch.bfloat16)
    assert summary["count"] == 3 and summary["real"] == 2 and summary["largest_gap"] is None
    assert json.dumps(summary, allow_nan=False)
    tie = equality.Divergence(prompt=0, position=0, gap=0.0)
    assert tie.real(torch.float64) and not tie.real(torch.float32)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    torch.set_num_threads(1)
    prompts = [
        {"tokens": record["tokens"][: 30 + i], "domain": ("library", "tests")[i % 2]}
        for i, record in enumerate(json.loads((DEMO.parent / "../assets/demo/prompts.json").read_text())[:5])
    ]
    path = tmp_path_factory.mktemp("prompts") / "prompts.json"
    path.write_text(json.dumps(prompts))
    config = load(DEMO, [f"evaluate.prompts={path}", "evaluate.new_tokens=12", "drafter.block_size=4"])
    return config, build(config, torch.device("cpu"))


def steady(figures: dict) -> dict:
    """Without what a clock says."""
    clocked = ("seconds", "tokens_per_second", "plain_tokens_per_second", "speedup", "batch")
    return {
        name: steady(value) if isinstance(value, dict) else value
        for name, value in figures.items()
        if name not in clocked
    }


def test_an_evaluation_holds_every_figure_and_does_not_depend_on_the_batch(parts):
    config, models = parts
    evaluator = evaluate.evaluator_of(config, models.target)
    whole = evaluator.measure(evaluator.proposer(models.drafter))
    assert {"temperature_0", "temperature_0.7", "rejection_temperature_0.7", "headline"} <= whole.keys()
    assert whole["prompts"] == whole["batch"] == 5 and whole["device"] == "cpu" and whole["dtype"] == "float32"
    for name in ("temperature_0", "temperature_0.7"):
        assert whole[name]["equal_to_plain"] == 5 and whole[name]["divergences"]["count"] == 0
    rejection = whole["rejection_temperature_0.7"]
    assert rejection["rule"] == "rejection" and "equal_to_plain" not in rejection and rejection["speedup"] > 0
    assert set(rejection["domains"]) == {"library", "tests"}
    assert whole["headline"]["name"] in ("temperature_0", "temperature_0.7")
    assert 0 < evaluator.margin < float("inf")

    evaluator.config = load(DEMO, ["evaluate.new_tokens=12", "evaluate.batch=2"]).evaluate
    parts_of_two = evaluator.measure(evaluator.proposer(models.drafter))
    assert parts_of_two["batch"] == 2 and steady(parts_of_two) == steady(whole)
    some = evaluator.measure(evaluator.proposer(models.drafter), prompts=3, compare=False)
    assert some["prompts"] == 3 and "rejection_temperature_0.7" not in some
    assert "speedup" not in some["temperature_0"] and "equal_to_plain" not in some["temperature_0"]


def test_warming_up_stays_inside_the_drafters_cache(parts):
    config, models = parts
    evaluator = evaluate.evaluator_of(config, models.target)
    evaluator.config = load(DEMO, ["evaluate.new_tokens=1"]).evaluate  # fewer than a block
    proposer = evaluator.proposer(models.drafter)
    evaluator._warm_up(proposer, evaluator._tokens(), evaluator.samplers())
    evaluator.config = load(DEMO, ["evaluate.new_tokens=2"]).evaluate
    evaluator._warm_up(evaluator.proposer(models.drafter), evaluator._tokens(), evaluator.samplers())


def test_figures_of_nothing_are_null_in_the_file(parts, tmp_path):
    config, models = parts
    one = load(DEMO, [f"evaluate.prompts={config.evaluate.prompts}", "evaluate.new_tokens=1", "drafter.block_size=4"])
    assert evaluate.evaluate_drafter(one, models, name="short", json=tmp_path / "short.json") == 0
    text = (tmp_path / "short.json").read_text()
    assert "NaN" not in text and json.loads(text)["drafter"]["temperature_0"]["tau"] is None  # no round, no tau


def test_a_prompt_beyond_the_targets_positions_is_refused(parts):
    config, models = parts
    most = models.target.config.max_position_embeddings
    fits = load(DEMO, [f"evaluate.prompts={config.evaluate.prompts}", f"evaluate.new_tokens={most - 34}"])
    evaluate.evaluator_of(fits, models.target)
    beyond = load(DEMO, [f"evaluate.prompts={config.evaluate.prompts}", f"evaluate.new_tokens={most - 33}"])
    with pytest.raises(
        TrainerError, match=f"prompt 4, counted from 0, has 34 tokens, .* exceed the target's {most} positions"
    ):
        evaluate.evaluator_of(beyond, models.target)


def test_figures_that_cannot_be_written_are_told_before_measuring(parts, tmp_path, capsys):
    config, models = parts
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainerError, match=r"cannot be written .*--json"):
        evaluate.evaluate_drafter(config, models, name="step 6", json=tmp_path / "file" / "figures.json")
    assert capsys.readouterr().out == ""


def test_texts_end_where_the_model_says(parts):
    config, models = parts
    evaluator = evaluate.evaluator_of(config, models.target)
    assert evaluator.ends == {0}
    generation = models.target.model.generation_config
    generation.eos_token_id = [0, 5]
    try:
        assert evaluator.ends == {0, 5}
    finally:
        generation.eos_token_id = 0


def test_tables_fit_eighty_columns_and_say_what_they_measured(parts, tmp_path, capsys):
    config, models = parts
    file = tmp_path / "new" / "evaluation.json"
    assert evaluate.evaluate_drafter(config, models, name="step 6", json=file) == 0
    printed = capsys.readouterr().out
    *lines, last = printed.splitlines()
    assert max(map(len, lines)) <= 80 and last == f"figures in {file}"
    for words in ("step 6: tau", "n-gram drafter: tau", "rejection 0.7", "by position", "tau by domain", "library"):
        assert words in printed, words
    written = json.loads(file.read_text())
    assert written["drafter"]["temperature_0"]["tau"] >= 1 and written["ngram"]["prompts"] == 5
    assert written["equal_to_plain"]["all"] and written["equal_to_plain"]["texts"] == 20
    assert "All 20 texts equal plain decoding." in printed


def test_a_text_that_differs_beyond_rounding_fails(parts, monkeypatch, capsys):
    config, models = parts
    right = decode.speculative

    def wrong(*arguments, **options):
        decoded = right(*arguments, **options)
        decoded.tokens[2][4] ^= 1
        return decoded

    monkeypatch.setattr(decode, "speculative", wrong)
    assert evaluate.evaluate_drafter(config, models, name="step 6") == 1
    printed = capsys.readouterr().out
    assert "4 of 20 texts leave plain decoding" in printed and "NOT rounding" in printed


def test_a_result_keeps_what_it_always_held_and_its_table_fits(parts):
    config, models = parts
    evaluator = evaluate.evaluator_of(config, models.target)
    end = evaluator.measure(evaluator.proposer(models.drafter))
    result = report.result_of(config, evaluator, end, end, end, steps=6, seconds=3.21)
    assert {"name", "seed", "steps", "seconds", "headline", "start", "end", "ngram", "rule", "baseline"} <= set(result)
    assert set(result["headline"]) == {"name", "repeat_8gram_share", "start", "end", "ngram"}
    equal = result["equal_to_plain"]
    assert equal["all"] and equal["within_rounding"] and equal["temperature_0"] == equal["prompts"] == 5
    assert equal["divergences"] == 0 and equal["bound"] == 1e-3 and equal["smallest_margin"] == evaluator.margin
    table = report.summary(result)
    assert max(map(len, table.splitlines())) <= 80
    assert "headline" in table and "speed-up" in table and "by position" in table

    worse = json.loads(json.dumps(end))
    worse["temperature_0"] |= {"equal_to_plain": 4}
    worse["temperature_0"]["divergences"] |= {"count": 1, "largest_gap": 5e-4}
    equal = report.equality_of({"start": end, "end": worse})
    assert equal["temperature_0"] == 4 and not equal["all"] and equal["within_rounding"] and equal["divergences"] == 1
    assert "1 of 20 texts leave plain decoding" in report.equality_line(equal)


def test_long_blocks_and_names_stay_inside_the_table():
    shares = [1 / (j + 1) for j in range(31)]
    row = {
        "tau": 31.123, "repeat_8gram_share": 1.0, "equal_to_plain": 1319, "tokens_per_second": 123456.7,
        "plain_tokens_per_second": 98765.4, "speedup": 12.34, "accepted_share": shares,
        "accepted_given_previous": [*shares[:-1], None],
        "domains": {"a name of a domain that is far too long": {"prompts": 1319, "rounds": 4, "tau": None}},
    }  # fmt: skip
    names = ("temperature_0", "temperature_0.7", "rejection_temperature_0.7")
    figures = {"prompts": 1319, "batch": 64, "device": "cuda:0", "dtype": "bfloat16", **dict.fromkeys(names, row)}
    text = report.evaluation(figures, "/a/long/directory/of/an/exported/drafter/step-000200")
    assert max(map(len, text.splitlines())) <= 80 and " 31\n" in text
