"""What is decided before any node is asked: files, GPUs, places, refusals, the script and its steps. All as values."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moe_asyncrl.cluster.gpus import Placement, given_ids, parse_ids, parse_positions, pick, place
from moe_asyncrl.cluster.slurm.call import SlurmSilent, inside_of_job, outside_of_jobs, slurm
from moe_asyncrl.cluster.slurm.layout import EnginePlace, lay_out
from moe_asyncrl.cluster.slurm.look import parse_looks
from moe_asyncrl.cluster.slurm.nodes import allocated
from moe_asyncrl.cluster.slurm.offer import gpus_of, parse_offers, refusal, seconds
from moe_asyncrl.cluster.slurm.script import job_script
from moe_asyncrl.cluster.slurm.steps import exit_code, first_to_fall, role_command, step_command, steps_of
from moe_asyncrl.cluster.task import check_interface, gpu_variables, rank_variables, with_host
from moe_asyncrl.config.cluster import Cluster
from moe_asyncrl.config.load import RecipeError, load_cluster
from moe_asyncrl.config.recipe import Data, Engine, Model, Recipe, Trainer
from moe_asyncrl.data.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = sorted((ROOT / "configs" / "clusters").glob("*.yaml"))


def recipe(*, dp: int = 2, ep: int = 1, count: int = 1, tp: int = 1) -> Recipe:
    return Recipe(
        model=Model(path="m"), data=Data(train="t"), trainer=Trainer(dp=dp, ep=ep), engine=Engine(count=count, tp=tp)
    )


def cluster(**fields: Any) -> Cluster:
    return msgspec.convert({"trainer": {"cpus_per_node": 64}, **fields}, Cluster)


# ---- GPU ids


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("8,9,10,11", ("8", "9", "10", "11")),
        ("[8-11]", ("8", "9", "10", "11")),
        ("0-1,[10-11],7", ("0", "1", "10", "11", "7")),
        ("GPU-3f-a1,MIG-7", ("GPU-3f-a1", "MIG-7")),
        ("", ()),
    ],
)
def test_gpu_ids_are_numbers_and_names_not_characters(text: str, ids: tuple[str, ...]) -> None:
    assert parse_ids(text) == ids


@pytest.mark.parametrize("text", ["11-8", "3,03", "1,1"])
def test_gpu_ids_that_contradict_themselves_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="GPU ids"):
        parse_ids(text)


def test_a_role_takes_its_place_among_the_gpus_that_it_was_given() -> None:
    """What libraries see, what the step has, what the job has: the narrowest counts."""
    step = {"SLURM_JOB_GPUS": "8-11", "SLURM_STEP_GPUS": "9-11", "LOCAL_RANK": "1"}
    assert given_ids(step) == ("9", "10", "11")
    assert gpu_variables("rank", step) == {"CUDA_VISIBLE_DEVICES": "10"}
    assert gpu_variables("1,2", {**step, "CUDA_VISIBLE_DEVICES": "4,10,12"}) == {"CUDA_VISIBLE_DEVICES": "10,12"}
    assert gpu_variables("10,11", {}) == {"CUDA_VISIBLE_DEVICES": "10,11"}
    assert gpu_variables(None, step) == {}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: pick(("9", "10"), (2,)), "needs 3 GPUs on its node, and the process may use only 9,10"),
        (lambda: pick((), (0,)), "may use none"),
        (lambda: parse_positions("rank", {}), "LOCAL_RANK is not set"),
        (lambda: parse_positions("GPU-1", {}), "expected positions such as 0,1"),
        (lambda: place(3, ranks=2, engines=1, tp=2), "need 4 GPUs, there are 3: a GPU is never shared"),
        (
            lambda: place(3, ranks=1, engines=2, tp=2, colocated=True),
            "need 4 GPUs, there are 3: engines share those of",
        ),
        (lambda: rank_variables({"SLURM_PROCID": "0"}), "neither RANK nor SLURM_LOCALID is set"),
    ],
)
def test_too_few_gpus_or_no_rank_is_one_sentence(call: Callable[[], object], says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        call()


def test_on_one_machine_trainer_and_engines_have_gpus_of_their_own() -> None:
    assert place(8, ranks=2, engines=3, tp=2) == Placement(trainers=((0,), (1,)), engines=((2, 3), (4, 5), (6, 7)))
    together = place(4, ranks=4, engines=2, tp=2, colocated=True)
    assert together == Placement(trainers=((0,), (1,), (2,), (3,)), engines=((0, 1), (2, 3)))
    assert place(0, ranks=2, engines=1, tp=2) == Placement(trainers=((), ()), engines=((),))


def test_a_rank_is_slurms_unless_it_is_said() -> None:
    step = {"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NTASKS": "16"}
    assert rank_variables(step) == {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16"}
    assert rank_variables({**step, "RANK": "3"}) == {}


# ---- places on nodes


def test_ranks_and_engines_lie_in_blocks_over_their_nodes() -> None:
    wide = {"nodes": 2, "gpus_per_node": 8, "cpus_per_node": 64}
    found = lay_out(recipe(dp=16, count=5, tp=2), cluster(trainer=wide, engine=wide))
    assert (found.shape, found.ranks, found.ranks_per_node) == ("one", 16, 8)
    assert found.engines == tuple(
        EnginePlace(group=1, node=node, gpus=gpus)
        for node, gpus in ((0, (0, 1)), (0, (2, 3)), (0, (4, 5)), (1, (0, 1)), (1, (2, 3)))
    )
    assert lay_out(recipe(dp=16, count=2), cluster(trainer=wide, engine={**wide, "gpus_per_node": 1})).shape == "het"


def test_engines_beside_the_trainer_take_the_gpus_behind_its_ranks() -> None:
    found = lay_out(recipe(dp=2, count=2, tp=3), cluster(trainer={"gpus_per_node": 8}))
    assert [place.gpus for place in found.engines] == [(2, 3, 4), (5, 6, 7)]
    assert {place.group for place in found.engines} == {0}


@pytest.mark.parametrize(
    ("run", "site", "says"),
    [
        (recipe(dp=3), {"trainer": {"nodes": 2}}, "trainer.nodes 2 of the cluster file does not divide"),
        (recipe(dp=9), {"trainer": {"gpus_per_node": 8}}, "need 9 GPUs of each; trainer.gpus_per_node"),
        (recipe(dp=9), {"trainer": {"cpus_per_node": 8}}, "need 9 CPUs of each; trainer.cpus_per_node"),
        (recipe(dp=2, tp=8), {"trainer": {"gpus_per_node": 8}}, "beside 2 trainer ranks need 10 GPUs of a node"),
        (recipe(tp=16), {"trainer": {"gpus_per_node": 8}, "engine": {"gpus_per_node": 8}}, "engine.gpus_per_node"),
        (recipe(), {"trainer": {"cpus_per_node": 2}, "engine": {"nodes": 2}}, "more than the recipe's 1 engines"),
    ],
)
def test_roles_that_the_nodes_do_not_hold_are_refused_with_the_field(run: Recipe, site: Any, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        lay_out(run, cluster(**site))


# ---- what a cluster has

SINFO = """
gpu*|4|96|1000000|gpu:h100:8(S:0-1)|2-00:00:00
gpu*|2|96|2000000|gpu:h100:4(S:0),shard:h100:8|2-00:00:00
cpu|10|128+|256000|(null)|infinite
slurm_load_partitions: something else
"""


def test_the_words_of_sinfo_are_read() -> None:
    offers = parse_offers(SINFO)
    assert [(o.partition, o.default, o.nodes, o.cpus) for o in offers] == [
        ("gpu", True, 4, 96), ("gpu", True, 2, 96), ("cpu", False, 10, 128),
    ]  # fmt: skip
    assert [o.gpus for o in offers] == [{"h100": 8}, {"h100": 4}, {}]
    assert gpus_of("gpu:12,gpu:a100:2(IDX:0-1)") == {"": 12, "a100": 2}
    assert [seconds(t) for t in ("2-01:00:00", "1:00:00", "30:00", "30", "1-2", "infinite")] == [
        176400, 3600, 1800, 1800, 93600, float("inf"),
    ]  # fmt: skip


FIVE = {"gpus_per_node": 5}


@pytest.mark.parametrize(
    ("run", "site", "says"),
    [
        (recipe(), {"trainer": {"gpus_per_node": 16}, "engine": FIVE},
         "no node of partition 'gpu' has 16 GPUs (trainer.gpus_per_node): the most that one has is 8"),
        (recipe(), {"trainer": {"gpus_per_node": 4}, "gres": "gpu:b200"},
         "no node of partition 'gpu' has 4 b200 GPUs (trainer.gpus_per_node): its nodes have none"),
        (recipe(), {"trainer": {"cpus_per_node": 200}}, "has 200 CPUs (trainer.cpus_per_node): the most that one has"),
        (recipe(), {"trainer": {"cpus_per_node": 2, "memory_gib": 4000}}, "has 4000 GiB (trainer.memory_gib)"),
        (recipe(), {"partition": "g"}, "partition 'g' does not exist; there are: cpu, gpu"),
        (recipe(dp=4, count=5), {"trainer": {"nodes": 2, "cpus_per_node": 2}, "engine": {"nodes": 5}},
         "has 6 nodes, and the run asks for 7"),
        (recipe(dp=5), {"trainer": {"nodes": 5, "gpus_per_node": 8}}, "trainer.nodes is 5, and only 4 nodes of"),
        (recipe(), {"time_limit": "3-00:00:00"}, "time_limit 3-00:00:00 is more than partition 'gpu' allows"),
        (recipe(), {"trainer": {"gpus_per_node": 8}, "engine": {"partition": "cpu", "gpus_per_node": 1}},
         "no node of partition 'cpu' has 1 GPUs (engine.gpus_per_node): its nodes have none"),
    ],
)  # fmt: skip
def test_what_no_node_can_give_is_refused_with_the_reason(run: Recipe, site: Any, says: str) -> None:
    reason = refusal(lay_out(run, cluster(**site)), cluster(**site), parse_offers(SINFO))
    assert reason is not None and says in reason


def test_a_run_that_fits_is_not_refused() -> None:
    site = cluster(
        trainer={"nodes": 2, "gpus_per_node": 8, "cpus_per_node": 96, "memory_gib": 900},
        engine={"partition": "cpu", "cpus_per_node": 100},
        time_limit="2-00:00:00",
    )
    assert refusal(lay_out(recipe(dp=16), site), site, parse_offers(SINFO)) is None


def test_why_a_job_waits_or_ended_is_said_in_words() -> None:
    looks = parse_looks(
        "7|PENDING|Resources||0:00|1:00:00\n8|PENDING|QOSMaxJobsPerUserLimit||0:00|1:00\n9|PENDING|Odd||0:00|1:00\n"
        "3+0|RUNNING|None|node[1-2]|0:07|30:00\n4|TIMEOUT|TimeLimit|node1|30:00|30:00\nsomething else\n"
    )
    assert [look.words() for look in looks] == [
        "job 7 waits for nodes to become free",
        "job 8 waits because of a limit of its account or quality of service (QOSMaxJobsPerUserLimit)",
        "job 9 waits (Odd)",
        "job 3+0 runs on node[1-2], 0:07 of 30:00",
        "job 4 ran into its time limit",
    ]
    assert [look.over for look in looks] == [False, False, False, False, True]


# ---- script and steps


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_the_example_clusters_make_whole_scripts(path: Path) -> None:
    site = load_cluster(path)
    run = recipe(dp=2 * site.trainer.nodes, count=2)
    script = job_script(lay_out(run, site), site, name="mine", run=Path("/runs/x"), log=Path("/runs/x/l.log"))
    assert script.startswith("#!/bin/bash\n") and "$" not in script and script.endswith("supervise /runs/x\n")
    assert f"#SBATCH --signal=B:USR2@{site.stop_lead_s}\n" in script
    assert f"#SBATCH --{'requeue' if site.requeue else 'no-requeue'}\n" in script
    for name, value in site.environment.items():
        assert f"export {name}={value}\n" in script


def test_a_het_job_asks_for_two_kinds_of_nodes_and_hides_nothing_from_the_shell() -> None:
    site = cluster(
        trainer={"nodes": 1, "gpus_per_node": 8, "cpus_per_node": 64, "constraint": "ib&nvme"},
        engine={"nodes": 2, "gpus_per_node": 4, "cpus_per_node": 32, "partition": "small"},
        gres="gpu:h100", account="us", qos="fast", modules=["cuda/12.4"], environment={"A": "it's $HOME; rm *"},
        network={"gloo": "net0", "nccl": "=net1"}, extra_sbatch=["--exclusive"], python="/venv/bin/python",
    )  # fmt: skip
    script = job_script(lay_out(recipe(dp=8, count=2), site), site, name="n", run=Path("/r/x"), log=Path("/r/l"))
    first, second = script.split("#SBATCH hetjob\n")
    for part, lines in (
        (first, ["--nodes=1", "--gres=gpu:h100:8", "--cpus-per-task=64", "--constraint=ib&nvme"]),
        (second, ["--nodes=2", "--gres=gpu:h100:4", "--cpus-per-task=32", "--partition=small"]),
    ):
        for line in [*lines, "--account=us", "--qos=fast", "--exclusive", "--time=24:00:00"]:
            assert f"#SBATCH {line}\n" in part
    body = second.split("set -euo pipefail\n")[1].split()
    assert "module load cuda/12.4\n" in script and "export A='it'\"'\"'s $HOME; rm *'\n" in script
    assert body[-6:] == ["exec", "/venv/bin/python", "-u", "-m", "moe_asyncrl.cli", "supervise", "/r/x"][-6:]
    assert "export GLOO_SOCKET_IFNAME=net0\n" in script and "export NCCL_SOCKET_IFNAME==net1\n" in script


def test_a_folder_that_slurm_would_misread_is_refused() -> None:
    site = cluster()
    with pytest.raises(UserError, match="cannot write to a name with blanks"):
        job_script(lay_out(recipe(), site), site, name="n", run=Path("/r/a b"), log=Path("/r/l"))


NODES = (
    "NodeName=n1 NodeAddr=10.0.0.1 x=1\nNodeName=n2 NodeHostName=h NodeAddr=10.0.0.2\nNodeName=n3 NodeAddr=n3.site\n"
)


def ask(command: list[str]) -> str:
    return "n1\nn2\nn3\n" if command[2] == "hostnames" else NODES


def test_steps_have_the_roles_commands_their_nodes_addresses_and_gpus() -> None:
    wide = {"gpus_per_node": 4, "cpus_per_node": 8}
    site = cluster(trainer={"nodes": 2, **wide}, engine=wide, python="/venv/bin/python")
    run = recipe(dp=8, count=2, tp=2)
    layout = lay_out(run, site)
    groups = allocated(layout, {"SLURM_JOB_NODELIST": "n[1-3]"}, ask, lambda name: "10.0.0.3")
    assert [[node.address for node in group] for group in groups] == [["10.0.0.1", "10.0.0.2"], ["10.0.0.3"]]
    steps = {step.name: step for step in steps_of(layout, run, groups)}
    assert list(steps) == ["buffer", "engine-0", "engine-1", "trainer", "rollout-0"]
    folder = Path("/r")
    assert " ".join(role_command(steps["engine-1"], folder)) == (
        "-m moe_asyncrl.cli role engine --run /r --host 10.0.0.3 --index 1 --gpus 2,3"
    )
    assert " ".join(role_command(steps["trainer"], folder)) == (
        "-m moe_asyncrl.cli role trainer --run /r --host 10.0.0.1 --gpus rank"
    )
    srun = step_command(steps["trainer"], site, run=folder, logs=folder / "logs", het=False)
    assert srun[srun.index("/venv/bin/python") :] == ["/venv/bin/python", *role_command(steps["trainer"], folder)]
    for option in ("--nodelist=n1,n2", "--ntasks=8", "--ntasks-per-node=4", "--gres=gpu:4", "--export=ALL"):
        assert option in srun
    buffer = step_command(steps["buffer"], site, run=folder, logs=folder / "logs", het=True)
    assert "--gres=none" in buffer and "--het-group=0" in buffer and "--nodelist=n1" in buffer


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        ("pyxis", ["--container-image=a.sqsh", "--container-mounts=/s:/s,/d", "--container-workdir=/r", "py"]),
        ("apptainer", ["apptainer", "exec", "--nv", "--bind", "/s:/s", "--bind", "/d", "--pwd", "/r", "a.sqsh", "py"]),
    ],
)
def test_roles_run_in_the_image_by_either_runtime(runtime: str, words: list[str]) -> None:
    box = {"image": "a.sqsh", "runtime": runtime, "mounts": ["/s:/s", "/d"], "python": "py"}
    site = cluster(container=box)
    run = recipe()
    layout = lay_out(run, site)
    (buffer, *_) = steps_of(layout, run, allocated(layout, {"SLURM_JOB_NODELIST": "n1"}, one_node))
    srun = step_command(buffer, site, run=Path("/r"), logs=Path("/r/logs"), het=False)
    at = srun.index(words[0])
    assert srun[at : at + len(words)] == words and srun[at + len(words)] == "-m"


def one_node(command: list[str]) -> str:
    return "n1\n" if command[2] == "hostnames" else NODES


def test_addresses_that_others_cannot_reach_are_refused() -> None:
    site = cluster(trainer={"nodes": 3, "cpus_per_node": 2})
    layout = lay_out(recipe(dp=3), site)
    job = {"SLURM_JOB_NODELIST": "n[1-3]"}
    with pytest.raises(UserError, match=r"resolves to 127\.0\.1\.1 here"):
        allocated(layout, job, ask, lambda name: "127.0.1.1")

    def unknown(name: str) -> str:
        raise OSError("not known")

    with pytest.raises(UserError, match="does not resolve"):
        allocated(layout, job, ask, unknown)
    with pytest.raises(UserError, match="SLURM_JOB_NODELIST is not set"):
        allocated(layout, {}, ask)
    with pytest.raises(UserError, match="the job has 1 nodes"):
        allocated(layout, job, one_node)


def test_each_role_listens_on_the_address_that_it_is_told() -> None:
    told = {role: with_host(recipe(), role, "10.0.0.9") for role in ("engine", "buffer", "trainer", "rollout")}
    own = "127.0.0.1"
    assert {role: (r.engine.host, r.buffer.host, r.weights.host) for role, r in told.items()} == {
        "engine": ("10.0.0.9", own, own),
        "buffer": (own, "10.0.0.9", own),
        "trainer": (own, own, "10.0.0.9"),
        "rollout": (own, own, own),
    }


# ---- what srun says


def test_of_a_step_that_fell_the_cause_is_named_not_the_consequence() -> None:
    killed = (
        "srun: error: node2: task 9: Exited with exit code 1\nsrun: error: node1: task 1: Killed\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=2.0\nsrun: error: node1: tasks 0,2: Terminated\n"
    )
    end = first_to_fall(killed)
    assert end is not None and (end.task, end.how, end.node, end.signalled) == (1, "Killed", "node1", True)
    raised = killed.replace("srun: error: node1: task 1: Killed\n", "")
    end = first_to_fall(raised)
    assert end is not None and (end.task, end.signalled) == (9, False)
    dumped = first_to_fall("srun: error: n: tasks 4-7: Segmentation fault (core dumped)\n")
    assert dumped is not None and (dumped.task, dumped.how) == (4, "Segmentation fault")
    assert first_to_fall("srun: error: Unable to create step for job 2: Invalid generic resource") is None
    assert [exit_code(c) for c in (None, 0, 3, 137, 143)] == [None, 0, 3, -9, -15]


# ---- files, environments, silence


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trainer: {gpus_per_nod: 8}", ":1: unknown key 'trainer.gpus_per_nod'; did you mean 'gpus_per_node'?"),
        ("trainer: {}\nengine:\n  node: 2\n", ":3: unknown key 'engine.node'; did you mean 'nodes'?"),
        ("partition: x", "missing 'trainer'; it has no default"),
        ("trainer: {gpus_per_node: -1}", ":1: trainer.gpus_per_node: expected `int` >= 0, found -1"),
        ('trainer: {}\ntime_limit: "1h"', ":2: time_limit: expected `str` matching regex"),
        ('trainer: {}\npartition: "a\\n#SBATCH --uid=0"', ":2: partition: expected"),
        ('trainer: {}\nextra_sbatch: ["--a\\n--b"]', "expected"),
        ("trainer: {}\nenvironment: {A-B: x}", "expected `str` matching regex"),
        ("trainer: {}\nenvironment: {A: 1}", "expected `str`, got `int`"),
        ("- 1", "expected sections (trainer:, engine:, ...), found list"),
    ],
)
def test_a_cluster_file_is_refused_as_a_recipe_is(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as refused:
        load_cluster(path)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_every_field_of_the_cluster_file_stands_in_its_document() -> None:
    text = (ROOT / "docs" / "slurm.md").read_text()
    kinds = [f.type for f in msgspec.structs.fields(Cluster)]
    sections = [k for kind in kinds for k in (kind, *getattr(kind, "__args__", ())) if hasattr(k, "__struct_fields__")]
    names = {f for kind in (Cluster, *sections) for f in kind.__struct_fields__}
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_variables_of_the_shell_neither_win_over_the_script_nor_narrow_the_steps() -> None:
    shell = {"SBATCH_PARTITION": "x", "SLURM_JOB_ID": "1", "SLURM_EXPORT_ENV": "NONE", "SLURM_CONF": "c", "A": "1"}
    assert outside_of_jobs(shell) == {"SLURM_CONF": "c", "A": "1"}
    assert inside_of_job({**shell, "RANK": "0"}) == {
        "SBATCH_PARTITION": "x", "SLURM_JOB_ID": "1", "SLURM_CONF": "c", "A": "1",
    }  # fmt: skip


def test_an_interface_that_the_node_lacks_is_named_with_those_that_it_has() -> None:
    check_interface({}, {"lo"})
    check_interface({"GLOO_SOCKET_IFNAME": "net0,lo"}, {"lo", "net0"})
    with pytest.raises(UserError, match=r"names 'net1', and this node has lo, net0: set network\.gloo"):
        check_interface({"GLOO_SOCKET_IFNAME": "net1"}, {"lo", "net0"})


def test_no_interface_is_written_into_the_code() -> None:
    """Names stand in cluster files only."""
    name = re.compile(r"[\"'=\s](?:lo|eth\d|ens\d\w*|enp\w+|ib\d|bond\d)[\"'\s]")
    files = [*(ROOT / "moe_asyncrl").rglob("*.py"), *(ROOT / "launch").iterdir()]
    found = [
        f"{p.name}:{n}" for p in files for n, line in enumerate(p.read_text().splitlines(), 1) if name.search(line)
    ]
    assert found == [] and name.search('export GLOO_SOCKET_IFNAME="eth0" ')


def test_a_command_that_is_missing_or_never_answers_is_one_sentence() -> None:
    with pytest.raises(SlurmSilent, match="no-such-sinfo: no such command here"):
        slurm(["no-such-sinfo"])
    with pytest.raises(SlurmSilent, match=r"sleep did not answer within 0\.2 s: is Slurm's controller up"):
        slurm(["sleep", "30"], deadline_s=0.2)
