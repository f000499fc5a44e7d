"""Pods of train_configs/kubernetes, as the kubelet starts them, each on a host of its own (namespaces.py).

The command, the environment and the mounts are those of the manifest. What an image would hold is a folder of programs:
`torchllm` of this checkout. A pod has one process. Volumes are folders.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.launched import PATIENCE, children
from tests.namespaces import Host
from tests.tiny_run import ROOT

FOLDER = ROOT / "train_configs/kubernetes"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
PROGRAMS = {
    "torchllm": f'exec "{sys.executable}" -c "from torchllm.cli import main; main()" "$@"',
}


class PodStart(NamedTuple):
    """What the kubelet starts."""

    name: str
    """of the pod, and of its host"""
    command: list[str]
    environment: dict[str, str]
    mounts: dict[str, str]
    """by path: the claim of the volume"""


def read_manifest(name: str) -> dict[str, Any]:
    """Return the objects of a manifest by kind."""
    objects = list(yaml.safe_load_all((FOLDER / name).read_text()))
    assert len({described["kind"] for described in objects}) == len(objects)
    return {described["kind"]: described for described in objects}


def pods_of_indexed_job(manifest: Mapping[str, Any]) -> list[PodStart]:
    """Return what the Job controller and the kubelet make of an Indexed Job."""
    job = manifest["Job"]
    assert job["spec"]["completionMode"] == "Indexed"
    pods = []
    for index in range(job["spec"]["completions"]):
        fields = {INDEX: str(index)}
        added = {"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}
        name = f"{job['metadata']['name']}-{index}"
        pods.append(_start_of(name, job["spec"]["template"]["spec"], [added], fields))
    return pods


def pods_of_pytorch_job(manifest: Mapping[str, Any]) -> list[PodStart]:
    """Return what the training operator and the kubelet make of a PyTorchJob.

    The variables are those of setPodEnv in pkg/controller.v1/pytorch/envvar.go of kubeflow/training-operator.
    """
    job = manifest["PyTorchJob"]
    name = job["metadata"]["name"]
    replicas = job["spec"]["pytorchReplicaSpecs"]
    total = sum(kind["replicas"] for kind in replicas.values())
    head, port = f"{name}-master-0", "23456"
    pods = []
    for kind in ("Master", "Worker"):
        for index in range(replicas[kind]["replicas"]):
            rank = len(pods)
            values = {"PYTHONUNBUFFERED": "1", "MASTER_PORT": port, "PET_MASTER_PORT": port}
            values |= {"MASTER_ADDR": head, "PET_MASTER_ADDR": head, "WORLD_SIZE": str(total), "RANK": str(rank)}
            values |= {"PET_NODE_RANK": str(rank), "PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"]}
            values["PET_NNODES"] = str(total)
            added = [{"name": variable, "value": value} for variable, value in values.items()]
            pods.append(_start_of(f"{name}-{kind.lower()}-{index}", replicas[kind]["template"]["spec"], added, {}))
    return pods


def _start_of(name: str, spec: dict[str, Any], added: list[dict[str, Any]], fields: dict[str, str]) -> PodStart:
    """Return what the kubelet starts of a pod. added: a controller's variables; fields: values for fieldRef."""
    (container,) = spec["containers"]
    environment: dict[str, str] = {}
    for variable in [*container.get("env", []), *added]:
        if "value" in variable:
            environment[variable["name"]] = _expand(variable["value"], environment)
        else:
            environment[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
    command = [_expand(word, environment) for word in [*container["command"], *container["args"]]]
    claims = {}
    for volume in spec["volumes"]:
        claims[volume["name"]] = volume.get("persistentVolumeClaim", {}).get("claimName", "")
    mounts = {mount["mountPath"]: claims[mount["name"]] for mount in container["volumeMounts"]}
    return PodStart(name, command, environment, mounts)


def _expand(text: Any, environment: Mapping[str, str]) -> str:
    """Put the variables that are set so far in place of `$(NAME)`; others stay, and `$$` is `$`."""
    assert isinstance(text, str), f"{text!r} must be quoted"

    def value(match: "re.Match[str]") -> str:
        return "$" if match[0] == "$$" else environment.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([\w.-]+)\)", value, text)


def make_image(folder: Path) -> Path:
    """Write the programs of the image; return their folder."""
    folder.mkdir()
    for name, script in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return folder


class Pod:
    """A running pod: its first process has the process id 1."""

    def __init__(self, start: PodStart, host: Host, image: Path, claims: Mapping[str, Path], output: Path) -> None:
        """Start it. claims: the folders of the volumes; output: the file for what it prints."""
        self.output = output
        mounting = [f'mount --bind "{claims[claim]}" {path}' for path, claim in start.mounts.items() if claim]
        container = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
        script = " && ".join([*mounting, 'exec "$@"'])
        environment = {"PATH": f"{image}:{os.defpath}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NPROC": "1"}
        command = host.command(*container, "sh", "-c", script, "sh", *start.command)
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                command, env=environment | start.environment, stdout=file, stderr=subprocess.STDOUT, cwd="/"
            )

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.output.read_text()

    def until(self, line: str) -> None:
        """Wait until it has printed something."""
        deadline = time.monotonic() + PATIENCE
        while line not in self.text:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.02)

    def evict(self) -> None:
        """Send SIGTERM to the first process, as the kubelet does."""
        pid = self.process.pid
        while True:
            (pid,) = children(pid)
            numbers = re.search(r"^NSpid:(.*)", Path(f"/proc/{pid}/status").read_text(), re.M)
            if numbers is not None and numbers[1].split()[-1] == "1":
                break
        os.kill(pid, signal.SIGTERM)

    def wait(self) -> int:
        """Return its exit status."""
        return self.process.wait(PATIENCE)


def write_toml(file: Path, overrides: Sequence[str]) -> None:
    """Write a config on the base of debug.toml. overrides: as on the command line."""
    lines = ['base = "debug.toml"']
    for word in overrides:
        key, _, value = word.removeprefix("--").partition("=")
        is_text = not re.fullmatch(r"true|false|[\d.e-]+", value)
        lines.append(f'{key} = "{value}"' if is_text else f"{key} = {value}")
    file.write_text("\n".join(lines) + "\n")
