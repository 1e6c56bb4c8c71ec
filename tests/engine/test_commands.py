"""The command lines through Hydra: options that arrive typed, one line for a mistake, exit codes, sweeps and help."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import cli
from engine.config import ExplainConfig, ScoreConfig
from engine.errors import ConfigError, InferenceError, RequestError
from engine.explain import explain

ROOT = Path(__file__).parents[2]
REQUEST = b'{"state": "s", "questions": {"q": {"type": "noul", "instructions": "i"}}}'

Command = Callable[..., tuple[int, list[Any]]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Runs `score` with these words; the exit code and the options each job got. The folder must stay empty."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # restored afterwards
    monkeypatch.chdir(tmp_path)

    def run(*words: str, job: Callable[[ScoreConfig], int] = lambda _: 0) -> tuple[int, list[Any]]:
        monkeypatch.setattr(sys, "argv", ["score", *words])
        got: list[ScoreConfig] = []

        def recorded(config: ScoreConfig) -> int:
            got.append(config)
            return job(config)

        code = cli.run_command("score", ScoreConfig, recorded)
        assert list(tmp_path.iterdir()) == []
        return code, got

    return run


def test_options_arrive_typed(command: Command) -> None:
    words = ("model=9b", "checkpoint=random", "seed=7", "tokens.control=special", "device=cuda:1", "request=-")
    code, [config] = command(
        *words, "graphs=captured", "warmup=[64,3136]", "memory.limit_gib=24", "memory.graphs_gib=1"
    )
    assert code == 0
    assert (config.model, config.seed, config.device, config.request) == ("9b", 7, "cuda:1", "-")
    assert config.tokens.control == "special"
    assert (config.graphs, config.warmup) == ("captured", [64, 3136])
    assert (config.memory.limit_gib, config.memory.graphs_gib) == (24.0, 1.0)


TEXTS = ("2026_11_30", "1e3", "epoch=3.json", "ticket (1).json", "café.json", "~/x.json", "a,b.json", "glob(*)")


@pytest.mark.parametrize("text", TEXTS)
def test_d44_text_arrives_as_typed(command: Command, text: str) -> None:
    code, [config] = command(f"request={text}", "tokenizer=007", "checkpoint=null", f"letters.system_message={text}")
    assert (code, config.request, config.tokenizer, config.checkpoint) == (0, text, "007", None)
    assert config.letters.system_message == text


def test_d44_text_arrives_as_typed_in_a_sweep(command: Command) -> None:
    names = ["epoch=3.json", "ticket (1).json", "2026_11_30", "'a, b.json'"]
    code, configs = command("-m", f"request={','.join(names)}", "out=a-${request}", "seed=1,2")
    assert code == 0
    assert [(c.request, c.out, c.seed) for c in configs] == [
        (name.strip("'"), f"a-{name.strip(chr(39))}", seed) for name in names for seed in (1, 2)
    ]


def test_d44_options_come_from_a_folder_of_ones_own(
    command: Command, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("own")
    (folder / "experiment").mkdir()
    for name, text in {
        "x": "# @package _global_\nseed: 5\nsplit: aligned\n",
        "number": "# @package _global_\nrequest: 2026_11_30\n",
        "typo": "# @package _global_\nreuqest: a\n",
        "inside": "seed: 5\n",
    }.items():
        (folder / "experiment" / f"{name}.yaml").write_text(text)
    code, [config] = command("+experiment=x", "--config-dir", str(folder), "request=1_0")
    assert (code, config.seed, config.split, config.request) == (0, 5, "aligned", "1_0")
    capsys.readouterr()
    for name, line in (
        ("number", "score: request=20261130 is of type int, not text; put it in quotes"),
        ("typo", "score: reuqest is not an option; did you mean 'request'?"),
        ("inside", "score: experiment is not an option; a file of options begins with the line `# @package _global_`"),
        ("y", "score: experiment=y is not one of inside, number, typo, x"),
    ):
        assert command(f"+experiment={name}", "--config-dir", str(folder)) == (2, [])
        assert capsys.readouterr().err.startswith(line)
    assert command("+experiment=x") == (2, [])


def test_every_graph_may_be_asked_for_while_loading(command: Command) -> None:
    code, [config] = command("warmup=all", "capture=load")
    assert (code, config.warmup, config.capture) == (0, "all", "load")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["spilt=exact"], "score: spilt is not an option; did you mean 'split'?"),
        (["tokens.contrl=plain"], "score: tokens.contrl is not an option; did you mean 'tokens.control'?"),
        (["+gem=fixed"], "score: gem is not an option; did you mean 'gemm'?"),
        (["engine.dtype=bf17"], "score: engine.dtype is not an option"),
        (["dtype=bf17"], "score: dtype=bf17 is not one of auto, bfloat16, float32"),
        (["model=foo"], "score: model=foo is not one of tiny, 4b, 9b, 27b"),
        (["gemm=tunde"], "score: gemm=tunde is not one of auto, default, fixed, tuned; did you mean 'tuned'?"),
        (["graphs=capture"], "score: graphs=capture is not one of auto, eager, compiled, captured; did you mean"),
        (["warmup=64"], "score: warmup=64 is neither a list of row counts nor the word all"),
        (["capture=never"], "score: capture=never is not one of answer, load, idle"),
        (["warmup=[0]"], "score: warmup=0 is not a whole number from 1 to 16,384"),
        (["memory.limit_gib=0"], "score: memory.limit_gib=0.0 is not a positive number"),
        (["max_length=-1"], "score: max_length=-1 is not a whole number from 1 to 16,384"),
        (["max_length=long"], "score: max_length=long: Value 'long' of type 'str' could not be converted to Integer"),
        (["hydra.ouput_subdir=x"], "score: hydra.ouput_subdir is not an option; did you mean 'hydra.output_subdir'?"),
        (["+hydra.run.dri=x"], "score: hydra.run.dri is not an option; did you mean 'hydra.run.dir'?"),
        (["hydra/job_loging=x"], "score: hydra/job_loging is not an option; did you mean 'hydra/job_logging'?"),
        (["hydra/launcher=joblib"], "score: hydra/launcher=joblib is not one of basic"),
        (["model"], "score: model is not of the form option=value"),
        (["r.json"], "score: r.json is not of the form option=value; did you mean request=r.json?"),
        (["split=exact,aligned"], "score: split=exact,aligned names several; -m runs one after the other"),
        (["model=9"], "score: model=9 is not one of tiny, 4b, 9b, 27b; did you mean '9b'?"),
        (["model=some/9b"], "score: model=some/9b is not one of tiny, 4b, 9b, 27b"),
        (["graphs=false"], "score: graphs=false is not one of auto, eager, compiled, captured"),
        (["head=null"], "score: head=null is not one of auto, scalar, yes_minus_no, letters"),
        (["dtype=1e3"], "score: dtype=1e3 is not one of auto, bfloat16, float32"),
        (["out=???"], "score: out=??? stands for a value that is still to be given"),
        (["max_length=???"], "score: max_length=??? stands for a value that is still to be given"),
        (["seed=("], "score: seed=( is not a value that Hydra reads; text is quoted for it, as in \"seed='...'\""),
        (["-m", "request=glob(*)"], "score: request=glob(*): glob() matches the words of an option only, never files"),
        (["-m", "split=glob(x*)"], "score: split=glob(x*): glob() matches none of aligned, exact; name them, as in"),
        (["-m", "request=choice(1)"], "score: request=1 is of type int, not text; put it in quotes"),
        (["--config-dir", "nowhere"], "score: --config-dir nowhere: no such folder"),
        (["-m", "split=exact,aligne"], "score: split=aligne is not one of exact, aligned; did you mean 'aligned'?"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(
    command: Command, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    assert command(*words) == (2, [])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith(line)
    assert len([said for said in err.splitlines() if not said.startswith("--- ")]) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("no"), 2), (RequestError("no"), 2), (InferenceError("no"), 1), (OSError(28, "No space left"), 1)],
)
def test_errors_of_a_job_are_one_line(
    command: Command, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    def fail(_: ScoreConfig) -> int:
        raise error

    assert command(job=fail)[0] == code
    assert capsys.readouterr() == ("", f"score: {error}\n")


def test_a_bug_keeps_its_traceback(command: Command) -> None:
    def fail(_: ScoreConfig) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        command(job=fail)


def test_ctrl_c_is_code_130(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(_: ScoreConfig) -> int:
        raise KeyboardInterrupt

    assert command(job=interrupt)[0] == 130
    assert capsys.readouterr().err == "score: interrupted\n"


def test_a_sweep_runs_every_job_and_leaves_no_folder(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    def fail_first(config: ScoreConfig) -> int:
        if config.split == "exact" and config.gemm == "fixed":
            raise InferenceError("not finite")
        return 0

    code, configs = command("-m", "split=exact,aligned", "gemm=fixed,default", job=fail_first)
    assert code == 1
    assert [(c.split, c.gemm) for c in configs] == [
        ("exact", "fixed"), ("exact", "default"), ("aligned", "fixed"), ("aligned", "default"),
    ]  # fmt: skip
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[:3] == ["--- split=exact gemm=fixed", "score: not finite", "--- split=exact gemm=default"]


def test_help_tells_what_can_be_set(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--help") == (0, [])
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "request=FILE.jsonl", "schedule=auto One of auto, independent, batched, levels, tree. How a request becomes",
        "max_length=4096 Tokens of", "memory.limit_gib Device memory",
    ):  # fmt: skip
        assert part in text


def explained(**options: Any) -> str:
    out = io.StringIO()
    assert explain(ExplainConfig(device="cpu", **options), stdin=io.BytesIO(REQUEST), stdout=out) == 0
    return out.getvalue()


def test_explain_needs_neither_weights_nor_a_cache(tmp_path: Path) -> None:
    report = json.loads(explained(model="27b", format="json", cache_dir=str(tmp_path)))
    assert list(report["layouts"]) == ["exact", "aligned"]
    assert report["candidates"] == 7
    assert 0 < report["layouts"]["exact"]["rows"] < report["layouts"]["aligned"]["rows"] < report["full_rows"]
    assert 47 < report["weight_bytes"] / 2**30 < 48
    assert list(tmp_path.iterdir()) == []


def test_explain_draws_the_chosen_split_of_the_request_it_names() -> None:
    text = explained(model="9b", split="aligned", request="-")
    assert "request: standard input" in text
    assert "aligned prefixes" in text
    assert "choose it with tokenizer=FOLDER" in text


def test_explain_reads_dimensions_and_tokenizer_of_a_checkpoint(tmp_path: Path) -> None:
    from engine.load.tiny import tiny_checkpoint

    folder = tiny_checkpoint(tmp_path, layers=8)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    report = json.loads(explained(checkpoint=str(folder), format="json"))
    assert report["tokenizer"] == str(folder)
    assert report["weight_bytes"] > 1.5 * json.loads(explained(format="json"))["weight_bytes"]


def test_explain_refuses_what_scoring_would() -> None:
    with pytest.raises(RequestError, match="exceeds max_length=16"):
        explained(max_length=16)


def test_the_module_runs_on_its_own(tmp_path: Path) -> None:
    """The real engine, a sweep of two, from a folder that holds nothing."""
    (tmp_path / "work").mkdir()
    words = ["-m", "split=exact,aligned", "device=cpu", f"cache_dir={tmp_path / 'cache'}"]
    run = subprocess.run(
        [sys.executable, "-m", "engine.score", *words],
        cwd=tmp_path / "work",
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    first, end = json.JSONDecoder().raw_decode(run.stdout)
    second = json.loads(run.stdout[end:])
    assert first["answers"] == second["answers"]
    assert (first["metadata"]["split"], second["metadata"]["split"]) == ("exact", "aligned")
    assert first["metadata"]["weights"] == "random"
    assert list((tmp_path / "work").iterdir()) == []
