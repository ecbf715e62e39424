"""JobSet and Kubeflow Trainer v2: plays their controllers, as far as a training job needs them.

A TrainJob and its runtime become a JobSet, and a JobSet becomes a headless Service and one Indexed
Job. Names and variables are those that the controllers give. Restarts of whole JobSets are not
played.
"""

from __future__ import annotations

from copy import deepcopy

from tests.kubernetes.control_plane import Json

INDEX_FIELD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
TRAINER_PORT = 29400


def job_of(bodies: list[Json]) -> list[Json]:
    """What the cluster runs in the end, for the objects of one of our folders."""
    kinds = {body["kind"]: body for body in bodies}
    if "TrainJob" in kinds:
        return from_jobset(from_train_job(kinds["TrainJob"], kinds["ClusterTrainingRuntime"]))
    if "JobSet" in kinds:
        return from_jobset(kinds["JobSet"])
    return bodies


def from_jobset(jobset: Json) -> list[Json]:
    (replicated,) = jobset["spec"]["replicatedJobs"]
    assert replicated.get("replicas", 1) == 1
    about, network = jobset["metadata"], jobset["spec"].get("network") or {}
    assert network.get("enableDNSHostnames", True)
    name, domain = f"{about['name']}-{replicated['name']}-0", network.get("subdomain")
    spec = deepcopy(replicated["template"]["spec"])
    spec["completionMode"] = "Indexed"
    spec["template"]["spec"]["subdomain"] = domain or about["name"]
    pod_labels = spec["template"].setdefault("metadata", {}).setdefault("labels", {})
    pod_labels["jobset.sigs.k8s.io/jobset-name"] = about["name"]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": domain or about["name"], "namespace": about["namespace"]},
        "spec": {
            "clusterIP": "None",
            "selector": {"jobset.sigs.k8s.io/jobset-name": about["name"]},
            "publishNotReadyAddresses": network.get("publishNotReadyAddresses", True),
        },
    }
    metadata = {"name": name, "namespace": about["namespace"]}
    return [
        service,
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec},
    ]


def from_train_job(job: Json, runtime: Json) -> Json:
    """The plugin for torch and the one for JobSet."""
    name, trainer = job["metadata"]["name"], job["spec"].get("trainer") or {}
    policy = runtime["spec"]["mlPolicy"]
    nodes = trainer.get("numNodes", policy.get("numNodes", 1))
    spec = deepcopy(runtime["spec"]["template"]["spec"])
    (replicated,) = spec["replicatedJobs"]
    labels = replicated["template"]["metadata"]["labels"]
    assert labels["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    of_job = replicated["template"]["spec"]
    of_job |= {"completions": nodes, "parallelism": nodes}
    (container,) = of_job["template"]["spec"]["containers"]
    for key in ("image", "command", "args"):
        if key in trainer:
            container[key] = trainer[key]
    given = [
        {"name": "PET_NNODES", "value": str(nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(trainer.get("numProcPerNode", "auto"))},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX_FIELD}}},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-{replicated['name']}-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": str(TRAINER_PORT)},
    ]
    container["env"] = [*container.get("env", ()), *trainer.get("env", ()), *given]
    container["ports"] = [*container.get("ports", ()), {"containerPort": TRAINER_PORT}]
    about = {"name": name, "namespace": job["metadata"]["namespace"]}
    return {"kind": "JobSet", "metadata": about, "spec": spec}
