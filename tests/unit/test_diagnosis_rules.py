"""Rules of the user's own, the first cause against its echoes, and what a diagnosis never says without a witness."""

from __future__ import annotations

import dataclasses

import pytest

from orchestrator.diagnosis import collect, user_rules
from orchestrator.diagnosis.facts import ElasticError, Environment, Exit, Facts, KernelLine
from orchestrator.diagnosis.rules import diagnose
from orchestrator.errors import ConfigError, UsageError
from tests.logs import corpus


@pytest.fixture
def of_text(tmp_path):
    def make(text, causes=None, **more):
        path = tmp_path / "console.log"
        path.write_text(text)
        facts = collect.of_file(str(path), causes) if causes else collect.of_file(str(path))
        facts = dataclasses.replace(facts, **more)
        return diagnose(facts, causes) if causes else diagnose(facts)

    return make


def ended(code=1, signal=None, **more):
    values = {"at": 100.0, "oom_kills": None, "machine_oom_kills": None, "reason": f"exit {code}", **more}
    return {"source": "run", "phase": "failed", "started": 10.0, "exit": Exit(code=code, signal=signal, **values)}


def test_a_rule_of_the_user(tmp_path, of_text):
    path = tmp_path / "rules.yaml"
    path.write_text(
        "rules:\n  - pattern: 'flux capacitor \\w+'\n    cause: flux\n    advice: Refill it.\n    retry: true\n"
    )
    causes = (*user_rules.from_file(path), *user_rules.CAUSES)
    said = of_text("step 1\nfatal: flux capacitor empty\n", causes)
    assert (said.cause, said.advice, said.retry) == ("flux", ("Refill it.",), True)
    assert of_text("fatal: flux capacitor empty, retrying\nstep 1\nstep 2\nstep 3\n", causes).cause == "healthy"


def test_mistakes_in_rules_are_told_with_their_lines(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text("rules:\n  - pattern: '('\n    cause: Bad\n  - pattern: 'a|b'\n    cause: ok\n    retri: true\n")
    with pytest.raises(ConfigError) as caught:
        user_rules.from_file(path)
    assert "rules.yaml:3: rules[0].cause must be a name" in caught.value.message
    assert 'rules.yaml:6: unknown key "retri"' in caught.value.message
    path.write_text("rules:\n  - pattern: '('\n    cause: bad\n  - pattern: 'a|b'\n    cause: healthy\n")
    with pytest.raises(ConfigError) as caught:
        user_rules.from_file(path)
    assert "rules.yaml:2: rules[0].pattern must be a regular expression" in caught.value.message
    assert "rules.yaml:4: rules[1].pattern must be a regular expression with three or more" in caught.value.message
    assert "rules.yaml:5: rules[1].cause must be a name" in caught.value.message
    path.write_text("rules:\n  - pattern: 'words'\n    cause: healthy\n")
    with pytest.raises(ConfigError, match=r"rules.yaml:3: rules\[0\].cause must .* neither healthy nor unknown"):
        user_rules.from_file(path)


def test_a_recipe_s_rules_go_before_the_catalogue(of_text):
    causes = user_rules.catalogue([{"pattern": "CUDA out of memory", "cause": "known-leak", "advice": "Upgrade."}])
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    assert of_text(text, causes).cause == "known-leak"


def test_exit_137_is_no_out_of_memory_without_a_witness(of_text):
    assert of_text("step 1\n", **ended(137)).cause == "killed"
    assert of_text("step 1\n", **ended(137, oom_kills=0, machine_oom_kills=0)).cause == "killed"
    assert of_text("step 1\n", **ended(137, oom_kills=1)).cause == "container-memory"


def test_a_caught_error_long_before_is_not_blamed_for_another_end(of_text):
    text = "ConnectionResetError: [Errno 104] Connection reset by peer\nretrying in 2 s\n"
    text += "".join(f"step {n} loss 1.{n}\n" for n in range(200))
    assert of_text(text, **ended(1)).cause == "unknown"
    text += "Traceback (most recent call last):\n  File \"t.py\", line 2, in <module>\n    x\nKeyError: 'rows'\n"
    said = of_text(text, **ended(1))
    assert said.cause == "uncaught-exception" and said.traceback.endswith("KeyError: 'rows'")


TRACE = 'Traceback (most recent call last):\n  File "{file}", line 2, in f\n    x\n{error}\n'
POLLUTED = Environment("0" * 16, ("sglang 0.5.9 was installed into this environment",), frozenset({"sglang", "torch"}))


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("ImportError: cannot import name 'x' from 'torch' (/e/torch/__init__.py)", "environment-drift"),
        ("AttributeError: module 'torch' has no attribute 'x'", "environment-drift"),
        ("ModuleNotFoundError: No module named 'torch._x'", "environment-drift"),
        ("ModuleNotFoundError: No module named 'absent'", "import-error"),
        ("AttributeError: 'NoneType' object has no attribute 'x'", "uncaught-exception"),
        ("KeyError: 'rows'", "uncaught-exception"),
        ("OSError: [Errno 28] No space left on device", "disk-full"),
    ],
)
def test_a_polluted_environment_is_the_cause_of_what_it_can_cause(of_text, error, cause):
    text = TRACE.format(file="/t.py", error=error)
    said = of_text(text, **ended(1), environment=POLLUTED)
    assert said.cause == cause
    told = [item.text for item in said.evidence] if cause == "environment-drift" else said.notes
    assert any(POLLUTED.changes[0] in line for line in told)
    for clean in (None, Environment("0" * 16), Environment("0" * 16, later=POLLUTED.changes)):
        assert of_text(text, **ended(1), environment=clean).cause != "environment-drift"


def test_a_polluted_environment_and_nothing_else(of_text):
    said = of_text("step 1\n", **ended(1), environment=POLLUTED)
    assert (said.cause, said.confidence) == ("environment-drift", "low")
    assert of_text("step 1\n", **ended(137), environment=POLLUTED).cause == "killed"
    inside = TRACE.format(file="/e/lib/python3.12/site-packages/sglang/a.py", error="KeyError: 'rows'")
    assert of_text(inside, **ended(1), environment=POLLUTED).cause == "environment-drift"
    goes_on = Facts(source="run", phase="training", now=100.0, started=10.0, environment=POLLUTED)
    assert diagnose(goes_on).cause == "healthy"


def test_an_unknown_end_keeps_its_witnesses(of_text):
    said = of_text("step 1\ngoodbye\n", **ended(3))
    assert (said.cause, said.confidence) == ("unknown", "low")
    assert [item.text for item in said.evidence] == ["exit 3", "goodbye"]


def test_the_first_rank_by_its_error_file(of_text):
    text = (
        "[rank1]: Traceback (most recent call last):\n[rank1]:   File \"t.py\", line 1, in f\n[rank1]: KeyError: 'b'\n"
    )
    files = (
        ElasticError(1, 50.5, "KeyError: 'b'", "1/error.json"),
        ElasticError(0, 50.0, "OSError: [Errno 28] No space left on device", "0/error.json"),
    )
    assert of_text("started\n", **ended(1), elastic=files).cause == "disk-full"
    assert of_text(text, **ended(1), elastic=files[:1]).cause == "uncaught-exception"


def test_a_rank_without_a_message_is_told_by_the_launcher_s_summary(of_text):
    said = of_text(
        "E1130 18:27:45.017000 517 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) "
        "local_rank: 1 (pid: 522) of binary: python\nTraceback (most recent call last):\n"
        '  File "torch/distributed/launcher/api.py", line 383, in launch_agent\n    raise ChildFailedError(\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "=====\nt.py FAILED\n-----\nFailures:\n[1]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : -15 (pid: 521)\n"
        "-----\nRoot Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n=====\n",
        **ended(1),
    )
    assert (said.cause, said.evidence[0].rank, said.traceback) == ("rank-died", 1, None)


def test_an_xid_after_the_end_is_teardown(of_text):
    text = "RuntimeError: CUDA error: unspecified launch failure\n"
    lost = "NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus."
    early, late = KernelLine(lost, 99.0, 79, "0000:41:00"), KernelLine(lost, 170.0, 79, "0000:41:00")
    assert of_text(text, **ended(1), kernel=(early,)).cause == "gpu-off-bus"
    assert of_text(text, **ended(1), kernel=(late,)).cause == "cuda-launch-failure"


def test_a_run_that_goes_on_is_healthy_with_a_broken_card_beside_it():
    kernel = (KernelLine("NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.", 50.0, 79, "0000:41:00"),)
    facts = Facts(source="run", phase="training", now=100.0, started=10.0, kernel=kernel)
    assert diagnose(facts).cause == "healthy"


@pytest.mark.parametrize("share", [0.05, 0.5, 0.99])
def test_a_cause_anywhere_in_a_large_log_with_echoes_after_it(tmp_path, share):
    filler = b"".join(b"step %d loss 1.%04d tokens/s 19876\n" % (n, n) for n in range(9000))
    cause = (corpus.HERE / "gpu/oom_model.log").read_bytes().replace(b"layer", b"[rank3]: layer")
    echo = (corpus.HERE / "public/nccl_watchdog_two_ranks.log").read_bytes()
    blocks = 30
    path = tmp_path / "console.log"
    with path.open("wb") as file:
        for block in range(blocks):
            if block == int(share * blocks):
                file.write(cause)
            file.write(filler)
        file.write(echo)
    assert diagnose(collect.of_file(str(path))).cause == "gpu-memory-size"


def test_a_log_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        collect.of_file(str(tmp_path / "none.log"))


@pytest.mark.parametrize(
    "mistake",
    [
        "unknown setting `stepz`: did you mean `steps`?",
        "`evaluate.every` needs `evaluate.prompts`",
        "`data.paths` names no file: /nope",
        "`device` cpu has no backward of flex attention; set `attention: dense`",
        "evaluate: expected settings below it, one a line",
    ],
)
@pytest.mark.parametrize("where", ["/var/lib/orch/runs/demo-1/trainer.yaml:41", "--set"])
def test_every_mistake_in_the_trainers_configuration_is_one(of_text, where, mistake):
    assert of_text(f"{where}: {mistake}\n", **ended(code=2)).cause == "usage-error"


def test_a_place_is_ahead_only_by_what_the_way_there_does_not_explain():
    assert collect.clock_skew(105.0, 100.0, 110.0) == 0
    assert collect.clock_skew(60.0, 100.0, 110.0) == -40
    assert collect.clock_skew(160.0, 100.0, 110.0) == 50
    assert collect.clock_skew(None, 100.0, 110.0) is None
