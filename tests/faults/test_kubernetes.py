"""The manifests of train_configs/kubernetes: their pods train, stop when one is evicted, and go on."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.namespaces import Network, can_make_hosts, network
from tests.pods import (
    Pod,
    PodStart,
    make_image,
    pods_of_indexed_job,
    pods_of_pytorch_job,
    read_manifest,
    write_toml,
)
from tests.recipes.warm import pretrain
from tests.tiny_run import QUIET, SMALL, assert_same_losses, changed, curve

STOPPED = 75
STEPS = 40
CHANGED = [f"--training.steps={STEPS}", "--checkpoint.interval=0", "--evaluate.interval=20"]
CHANGED += ["--training.global_batch_size=12"]  # of 1, 2 or 3 ranks
RUN = changed(SMALL, *QUIET, *CHANGED)


def pod_spec(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the manifest of a Job says about each pod."""
    spec: dict[str, Any] = job["spec"]["template"]["spec"]
    return spec


def test_the_indexed_job_fits_its_service_and_its_run() -> None:
    manifest = read_manifest("indexed_job.yaml")
    job, service = manifest["Job"], manifest["Service"]
    name = job["metadata"]["name"]
    label = {"batch.kubernetes.io/job-name": name}  # which the Job controller gives each pod
    assert service["spec"] == {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": label}
    assert pod_spec(job)["subdomain"] == service["metadata"]["name"]
    policy = manifest["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == label
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": label}}]}]
    assert pod_spec(job)["restartPolicy"] == "Never"  # podFailurePolicy needs it
    first, second = pods_of_indexed_job(manifest)
    assert job["spec"]["parallelism"] == 2
    assert first.environment["PET_MASTER_ADDR"] == f"{first.name}.{service['metadata']['name']}"
    assert {key: first.environment[key] for key in ("PET_NNODES", "PET_NODE_RANK")} == {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "0",
    }
    assert second.environment == first.environment | {"PET_NODE_RANK": "1", "JOB_COMPLETION_INDEX": "1"}
    assert second.mounts == {"/mnt": manifest["PersistentVolumeClaim"]["metadata"]["name"], "/dev/shm": ""}
    container = pod_spec(job)["containers"][0]["name"]
    actions = {}
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {"values": []})
        assert codes.get("containerName", container) == container
        actions |= dict.fromkeys(codes["values"], rule["action"])
    assert actions == {2: "FailJob", STOPPED: "Ignore"}
    assert f"--run.stopped_exit_status={STOPPED}" in first.command


def test_both_manifests_start_the_same() -> None:
    indexed = pods_of_indexed_job(read_manifest("indexed_job.yaml"))
    manifest = read_manifest("pytorch_job.yaml")
    operated = pods_of_pytorch_job(manifest)
    for pod, operated_pod in zip(indexed, operated, strict=True):
        assert operated_pod.command == pod.command
        assert operated_pod.mounts == pod.mounts
        for variable in ("PET_NNODES", "PET_NODE_RANK"):
            assert operated_pod.environment[variable] == pod.environment[variable]
    label = {"training.kubeflow.org/job-name": manifest["PyTorchJob"]["metadata"]["name"]}
    policy = manifest["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == label
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": label}}]}]
    for kind in manifest["PyTorchJob"]["spec"]["pytorchReplicaSpecs"].values():
        assert kind["restartPolicy"] == "OnFailure"  # with Never an evicted pod would be the end
        assert kind["template"]["spec"]["containers"][0]["name"] == "pytorch"


@dataclass
class Cluster:
    """A network of hosts, and what their pods share."""

    network: Network
    image: Path
    claims: Mapping[str, Path]
    folder: Path

    def start(self, pods: list[PodStart], attempt: str) -> list[Pod]:
        started = []
        for pod in pods:
            output = self.folder / f"{pod.name}-{attempt}.txt"
            started.append(Pod(pod, self.network.hosts[pod.name], self.image, self.claims, output))
        return started


@contextmanager
def cluster(names: list[str], subdomain: str, folder: Path) -> Iterator[Cluster]:
    """Make hosts for pods, whose names are also known as those of a headless service."""
    volume = folder / "volume"
    volume.mkdir(parents=True)
    write_toml(volume / "my_run.toml", RUN)
    with network(names, folder) as made:
        with (folder / "hosts").open("a") as table:
            for name, host in made.hosts.items():
                table.write(f"{host.address} {name}.{subdomain}\n")
        yield Cluster(made, make_image(folder / "image"), {"my-run": volume}, folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run on two ranks, without a fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert pretrain(2, folder, *CHANGED) == ["", ""]
    return folder


def with_pods(manifest: dict[str, Any], pods: int) -> list[PodStart]:
    """Return the pods of an Indexed Job whose number somebody has changed, as its first lines say."""
    job = manifest["Job"]["spec"]
    job["completions"] = job["parallelism"] = pods
    variables = job["template"]["spec"]["containers"][0]["env"]
    (number,) = [variable for variable in variables if variable["name"] == "PET_NNODES"]
    number["value"] = str(pods)
    return pods_of_indexed_job(manifest)


@pytest.fixture(scope="module")
def _needs_hosts() -> None:
    if not can_make_hosts():
        pytest.skip("making namespaces needs root, unshare and ip")


MAKERS = {"indexed_job.yaml": pods_of_indexed_job, "pytorch_job.yaml": pods_of_pytorch_job}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_needs_hosts")
@pytest.mark.parametrize("name", MAKERS)
def test_pods_stop_with_a_checkpoint_when_one_is_evicted_and_started_again_go_on(
    undisturbed: Path, tmp_path: Path, trials: int, name: str
) -> None:
    """The first trial starts the same pods again, later ones of the Indexed Job one and three."""
    pods = MAKERS[name](read_manifest(name))
    for trial in range(trials):
        folder = tmp_path / str(trial)
        names = [pod.name for pod in with_pods(read_manifest("indexed_job.yaml"), 3)]
        if name == "pytorch_job.yaml":
            names = [pod.name for pod in pods]
        with cluster(names, "my-run", folder) as hosts:
            started = hosts.start(pods, "first")
            started[0].until("step  4/40")
            started[1 - trial % 2].evict()
            assert [pod.wait() for pod in started] == [STOPPED] * 2, started[0].text
            assert "stopped early, with a checkpoint" in started[0].text
            number = (2, 1, 3)[trial % 3] if name == "indexed_job.yaml" else 2
            successors = pods if number == 2 else with_pods(read_manifest(name), number)
            started = hosts.start(successors, "second")
            assert [pod.wait() for pod in started] == [0] * number, started[0].text
            assert "resuming from /mnt/my-run/checkpoints/step-" in started[0].text
        assert_same_losses(folder / "volume/my-run", undisturbed)
        if number == 2:
            assert curve(folder / "volume/my-run") == curve(undisturbed)
