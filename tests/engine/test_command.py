"""Command lines and environments as values, for a CPU and for a GPU machine."""

from __future__ import annotations

import msgspec
import pytest

from moe_asyncrl.engine.command import ONPATH, EngineArgs, build_command, child_environment, spread_cores

ARGS = EngineArgs(model="/models/m", port=4321, python="/envs/sglang/bin/python")


def options(args: EngineArgs, *, cpu: bool) -> dict[str, str | None]:
    """Option → value (None for a flag), with `--a=b` split."""
    found: dict[str, str | None] = {}
    argv = build_command(args, cpu=cpu).argv[3:]
    for i, word in enumerate(argv):
        if word.startswith("--"):
            name, _, value = word.partition("=")
            following = argv[i + 1] if i + 1 < len(argv) else "--"
            found[name] = value or (None if following.startswith("--") else following)
    return found


CPU_ONLY = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--grammar-backend": "none",
    "--disable-cuda-graph": None,
    "--disable-overlap-schedule": None,
    "--sleep-on-idle": None,
    "--max-total-tokens": "65536",
    "--mem-fraction-static": "0.3",
}


def test_a_gpu_engine_keeps_sglangs_own_choices() -> None:
    gpu, cpu = options(ARGS, cpu=False), options(ARGS, cpu=True)
    assert {k: v for k, v in cpu.items() if k not in gpu} == CPU_ONLY
    assert all(cpu[k] == v for k, v in gpu.items())
    assert build_command(ARGS, cpu=False).env == {"MOE_ASYNCRL_ENGINE": "gpu"}
    env = build_command(ARGS, cpu=True).env
    assert env["SGLANG_USE_CPU_ENGINE"] == "1" and env["TORCHDYNAMO_DISABLE"] == "1" and env["OMP_NUM_THREADS"] == "1"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in env


@pytest.mark.parametrize("cpu", [True, False])
def test_every_field_reaches_the_command(cpu: bool) -> None:
    args = EngineArgs(
        model="/models/m",
        port=4321,
        python="py",
        host="10.0.0.7",
        dtype="bfloat16",
        tp=4,
        ep=2,
        moe=True,
        context_length=99,
        max_running_requests=17,
        max_total_tokens=1234,
        mem_fraction=0.5,
        random_seed=5,
        weight_version=8,
        tokenizer=True,
        mask_tokens=64,
        cores=(0, 1, 2, 3),
        extra_args=("--page-size", "16"),
        extra_env={"OMP_NUM_THREADS": "3"},
    )
    command, found = build_command(args, cpu=cpu), options(args, cpu=cpu)
    assert command.argv[:3] == ("py", "-m", "moe_asyncrl.engine.plugin.serve")
    expected = {
        "--model-path": "/models/m",
        "--host": "10.0.0.7",
        "--port": "4321",
        "--dtype": "bfloat16",
        "--tp-size": "4",
        "--ep-size": "2",
        "--enable-return-routed-experts": None,
        "--context-length": "99",
        "--max-running-requests": "17",
        "--max-total-tokens": "1234",
        "--mem-fraction-static": "0.5",
        "--random-seed": "5",
        "--weight-version": "8",
        "--sampling-mask-max-tokens": "64",
        "--page-size": "16",
    }
    assert expected.items() <= found.items() and "--skip-tokenizer-init" not in found
    assert command.argv[-2:] == ("--page-size", "16")
    assert command.env["OMP_NUM_THREADS"] == "3"
    assert command.env.get("SGLANG_CPU_OMP_THREADS_BIND") == ("0|1|2|3" if cpu else None)


def test_a_dense_model_records_no_experts() -> None:
    dense = msgspec.structs.replace(ARGS, moe=False)
    assert "--enable-return-routed-experts" not in options(dense, cpu=True)
    assert "--skip-tokenizer-init" in options(dense, cpu=True)


def test_the_api_key_is_not_among_the_arguments() -> None:
    command = build_command(msgspec.structs.replace(ARGS, api_key="s3cret"), cpu=True)
    assert not any("s3cret" in word for word in command.argv)
    assert "s3cret" in command.env.values()


def test_contradictions_are_named() -> None:
    with pytest.raises(ValueError, match="ep=2 does not divide tp=3"):
        build_command(msgspec.structs.replace(ARGS, tp=3, ep=2), cpu=False)
    with pytest.raises(ValueError, match="needs 2 cores"):
        build_command(msgspec.structs.replace(ARGS, tp=2), cpu=True)


def test_the_users_path_stays_behind_ours() -> None:
    command = build_command(ARGS, cpu=True)
    assert child_environment({"PYTHONPATH": "/a:/b", "X": "1"}, command)["PYTHONPATH"] == f"{ONPATH}:/a:/b"
    assert child_environment({}, command)["PYTHONPATH"] == str(ONPATH)
    assert child_environment({"X": "1"}, command)["X"] == "1"


def test_cores_are_neighbours_and_wrap_round() -> None:
    assert [spread_cores(2, i, (0, 1, 4, 5, 6)) for i in range(3)] == [(0, 1), (4, 5), (6, 0)]
