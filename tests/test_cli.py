"""The command line, through click's test runner and once as a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner, Result

import moepool
from moepool.cli import main
from moepool.runner import bundled_model
from moepool.runner.devices import available_devices

PROMPT = ["-p", "import os\n\n\ndef "]


def run(*arguments: str | Path, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    if code:
        assert isinstance(result.exception, SystemExit), "a traceback would have been printed"
    return result


def run_json(*arguments: str | Path) -> Any:
    return json.loads(run(*arguments, "--json", "-").stdout)


def test_generate_prints_the_text_alone_on_standard_output() -> None:
    result = run("generate", "tiny-moe", *PROMPT, "-n", "8", "--slots", "8")
    report = run_json("generate", bundled_model(), *PROMPT, "-n", "8")
    assert result.stdout == report["text"] + "\n"
    assert "logits sha256 " + report["logits_sha256"][:16] in result.stderr
    assert "hit rate" in result.stderr


@pytest.mark.usefixtures("settings_kept")
def test_generate_reports_the_run(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    options = ["-n", "6", "--slots", "8", "--miss", "host", "--threads", "1", "--ignore-eos"]
    run("generate", "tiny-moe", *PROMPT, *options, "--json", path)
    report = json.loads(path.read_text())
    assert report["placement"]["slots"] == 8
    assert report["placement"]["miss"] == "host"
    assert report["threads"] == 1
    assert len(report["tokens"]) == 6
    assert len(report["step_seconds"]) == 5
    assert len(report["logits_sha256"]) == 64
    assert report["stats"]["misses"] > 0


def test_sampling_follows_the_seed() -> None:
    options = ["generate", "tiny-moe", *PROMPT, "-n", "12", "--temperature", "1.5", "--top-k", "50"]
    texts = [run_json(*options, "--seed", str(seed))["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_profile_chooses_the_hot_set(tmp_path: Path) -> None:
    profile = tmp_path / "profile.csv"
    free = ["generate", "tiny-moe", *PROMPT, "-n", "12", "--ignore-eos"]
    first = run_json(*free, "--profile", profile)
    static = [*free, "--slots", "16", "--policy", "static"]
    hot, cold = run_json(*static, "--hot", profile), run_json(*static)
    assert hot["logits_sha256"] == cold["logits_sha256"] == first["logits_sha256"]
    assert hot["stats"]["hit_rate"] > cold["stats"]["hit_rate"]
    assert "--policy static" in run(*free, "--hot", profile, code=1).stderr
    profile.write_text("nonsense\n")
    assert "line 1" in run(*static, "--hot", profile, code=1).stderr


def test_perplexity_of_a_text(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"The option {i} is described in section {i + 1}.\n" for i in range(120)))
    options = ["perplexity", "tiny-moe", text, "--context", "64"]
    result = run(*options, "--windows", "2")
    assert result.stdout.startswith("perplexity ")
    assert "62 predictions of 2 windows" in result.stdout
    report = run_json(*options, "--windows", "2", "--slots", "8", "--batch", "4")
    assert report["windows"] == 2
    assert report["scored"] == 62
    assert report["perplexity"] == pytest.approx(float(result.stdout.split()[1]), rel=0.01)
    assert report["stats"]["hits"] > 0
    assert run_json(*options)["windows"] > 2


def test_perplexity_refuses_what_is_no_text(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"\xff\xfe" * 2000)
    assert "not UTF-8" in run("perplexity", "tiny-moe", text, code=1).stderr
    text.write_text("short")
    assert "fewer than a window" in run("perplexity", "tiny-moe", text, code=1).stderr


def test_info_of_the_bundled_model() -> None:
    report = run_json("info", "tiny-moe")
    assert report["name"] == "tiny-moe-28M"
    assert report["architecture"] == "qwen3moe"
    assert report["experts_used"] == 4
    assert [layer["block"] for layer in report["layers"]] == [0, 1, 2, 3]
    with moepool.ExpertStore.from_gguf(bundled_model(), progress=False) as store:
        assert [layer["record_bytes"] for layer in report["layers"]] == [x.record_bytes for x in store]
        types = [{name: matrix.qtype for name, matrix in x.matrices.items()} for x in store]
    assert [layer["types"] for layer in report["layers"]] == types
    assert [cost["slots"] for cost in report["slot_costs"]] == [8, 16, 32]
    assert [cost["bytes"] for cost in report["slot_costs"]] == [
        n * report["record_bytes"] for n in (8, 16, 32)
    ]
    first = report["layers"][0]
    assert (first["hidden"], first["width"], first["experts"]) == (256, 256, 32)
    assert first["expert_bytes"] == 3 * 256 * 144  # Q4_K: 144 bytes a row of 256
    printed = run("info", "tiny-moe").stdout
    assert "4 MoE layers, 32 experts, top-4" in printed
    assert "110,592" in printed


def test_info_reads_other_architectures(tmp_path: Path) -> None:
    path = _model(tmp_path / "other.gguf", "mixtral")
    report = run_json("info", path)
    assert report["architecture"] == "mixtral"
    assert report["layers"][0]["types"] == {"gate": "q8_0", "up": "q8_0", "down": "f16"}
    assert [cost["slots"] for cost in report["slot_costs"]] == [8, 12]


def test_info_shows_types_that_are_not_computed(tmp_path: Path) -> None:
    path = _model(tmp_path / "other.gguf", "mixtral", up="TQ2_0", columns=256)
    report = run_json("info", path)
    assert report["layers"][0]["types"] == {"gate": "q8_0", "up": "tq2_0", "down": "f16"}
    assert report["layers"][0]["expert_bytes"] == 256 * (256 // 32 * 34 + 66 + 512)
    assert report["not_computed"] == ["tq2_0"]
    assert report["record_bytes"] is None
    assert report["slot_costs"] == []
    printed = run("info", path).stdout
    assert "tq2_0 *" in printed
    assert "* tq2_0: not computed by moepool" in printed
    with pytest.raises(
        moepool.UnsupportedError, match="'blk.0.ffn_up_exps.weight' is tq2_0.*it computes f32,.*q8_0"
    ):
        moepool.ExpertStore.from_gguf(path)


def test_doctor_measures_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured: list[str] = []

    def measure(device: str) -> moepool.Rates:
        measured.append(device)
        if device != "cpu":
            raise moepool.UnsupportedError("no CuPy")
        return moepool.Rates("cpu", 10e9, 1e-5, threads=3, spread=0.25)

    monkeypatch.setattr("moepool.cli.measure_rates", measure)
    printed = run("doctor", "--measure").stdout
    assert "Experts are read at 10.0 GB/s by 3 CPU threads" in printed
    assert "took 25 % longer than the fastest, which is kept: measure again" in printed
    assert moepool.Rates.load(tmp_path / "moepool" / "rates.json").threads == 3
    monkeypatch.setattr(
        "moepool.cli.available_devices", lambda: {"cpu": moepool.memory(), "cuda:0": moepool.memory()}
    )
    result = run("doctor", "--measure", "--json", "-")
    assert "only the CPU is measured: no CuPy" in result.stderr
    assert json.loads(result.stdout)["rates"]["threads"] == 3
    assert measured == ["cpu", "cuda:0", "cpu"]


def test_doctor_tells_devices_and_build() -> None:
    report = run_json("doctor")
    assert report["devices"]["cpu"]["total"] > report["devices"]["cpu"]["free"] > 0
    assert report["devices"]["cpu"]["source"]
    assert report["cpu_kernels"]["portable"] is True
    assert report["threads"] == moepool.get_threads()
    assert report["build"] == moepool.build_info()
    printed = run("doctor").stdout
    for word in ("cpu", "portable", "q4_k", "source"):
        assert word in printed


def _model(path: Path, architecture: str, up: str = "Q8_0", columns: int = 64) -> Path:
    """A GGUF file with the experts of one layer and nothing else."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_uint32(f"{architecture}.expert_count", 12)
    rng = np.random.default_rng(0)
    for name, kind in (("gate", "Q8_0"), ("up", up), ("down", "F16")):
        qtype = gguf.GGMLQuantizationType[kind]
        values = rng.standard_normal((12, columns, columns), dtype=np.float32)
        data = gguf.quants.quantize(values, qtype)
        writer.add_tensor(f"blk.0.ffn_{name}_exps.weight", data, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _error(result: Result) -> str:
    """The one line an error is told in."""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("Error: ")
    return lines[0]


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    path = _model(tmp_path / "other.gguf", "mixtral")
    assert "'mixtral'" in _error(run("generate", path, *PROMPT, code=1))


def test_broken_files_are_one_line(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(bundled_model().read_bytes()[:-1])
    assert "blk." in _error(run("generate", cut, *PROMPT, code=1))
    assert "blk." in _error(run("info", cut, code=1))
    cut.write_text("not a model")
    assert "GGUF" in _error(run("info", cut, code=1))


def test_bad_options_are_one_line(tmp_path: Path) -> None:
    generate = ["generate", "tiny-moe", *PROMPT, "-n", "1"]
    assert "top_p" in _error(run(*generate, "--top-p", "0", code=1))
    assert "'--device': device is 'abacus'" in run(*generate, "--device", "abacus", code=2).stderr
    assert "half_life needs a value" in run(*generate, "--policy", "lfu:half_life", code=2).stderr
    missing = tmp_path / "no" / "such" / "folder.json"
    for option in ("--json", "--profile"):
        result = run(*generate, option, missing, code=2)
        assert "there is no directory" in result.stderr
        assert result.stdout == "", "found out after the run"
        assert "is a directory" in run(*generate, option, tmp_path, code=2).stderr
    assert "does not exist" in run("info", tmp_path / "none.gguf", code=2).stderr
    assert "--policy" in run(*generate, "--policy", "mru", code=2).stderr
    assert "MOEPOOL_POLICY" not in run(*generate, "--policy", "mru", code=2).stderr


@pytest.mark.skipif("cuda:0" in available_devices(), reason="there is a GPU")
def test_a_missing_gpu_is_one_line() -> None:
    assert "cuda" in _error(run("generate", "tiny-moe", *PROMPT, "--device", "cuda:0", code=1)).lower()
    assert "no GPU" in run("doctor").stdout


def test_warnings_are_one_line() -> None:
    stderr = run("generate", "tiny-moe", *PROMPT, "-n", "2", "--slots", "1").stderr
    warned = [line for line in stderr.splitlines() if line.startswith("Warning: ")]
    assert warned
    assert not any("MoePoolWarning" in line or ".py" in line for line in stderr.splitlines())


def test_a_policy_without_slots_is_told() -> None:
    short = ("generate", "tiny-moe", *PROMPT, "-n", "1")
    assert "--policy lfu has no effect without --slots" in run(*short, "--policy", "lfu").stderr
    assert "no effect" not in run(*short).stderr + run(*short, "--policy", "lfu", "--slots", "8").stderr


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "moepool", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"moepool, version {moepool.__version__}"
