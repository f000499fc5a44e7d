"""Forks of recipes/pretrain.py for the proof: mistakes that it must find, and changes that it must not call wrong."""

from tests.tools.proof.forks import Change

OPTIMIZER = "build_optimizer(stages, config.optimizer)"
RATE = "LearningRate(config.schedule, config.optimizer.learning_rate, config.training.steps)"
STEP = "            result = step(n, packed.unpack(device))\n"
BEGIN = "    monitor.begin(config, mesh, stages, data, start)\n"
SCALED_BY_STEPS = """
STEPS = {"taken": 0}


def hook(mlp, inputs):
    return (inputs[0] * (1 + 0.1 * STEPS["taken"]),)
"""
PARAMETERS = "[parameter for stage in stages for parameter in stage.parameters()]"
WHOLE_LOG_Z = """        log_z = torch.logsumexp(logits.float(), -1)
        log_z = log_z.full_tensor() if hasattr(log_z, "full_tensor") else log_z
"""


def of_blocks(hook: str, part: str = "mlp", kind: str = "forward_pre_hook") -> Change:
    """Return a change that registers a function `hook` on a part of every block."""
    return Change(f"""
{hook}


def change(stages):
    for stage in stages:
        for block in stage.layers.values():
            block.{part}.register_{kind}(hook)
""")


def of_loss(body: str) -> Change:
    """Return a change of the loss. body: of a function of logits, labels and `whole`, the loss of the recipe."""
    return Change(f"""
def own_loss(whole):
    def loss(logits, labels):
{body}
    return loss


def change(stages):
    for stage in stages:
        if stage.lm_head is not None:
            stage.lm_head.cross_entropy = own_loss(stage.lm_head.cross_entropy)
""")


def of_optimizer(optimizer: str, definitions: str = "") -> Change:
    return Change(definitions, "", ((OPTIMIZER, optimizer),))


MISTAKES = {
    "mean over local tokens": of_blocks(
        "def hook(mlp, inputs):\n    return (inputs[0] - inputs[0].mean(dim=1, keepdim=True),)"
    ),
    "mean over local sequences": of_blocks(
        "def hook(mlp, inputs):\n    return (inputs[0] - inputs[0].mean(dim=0, keepdim=True),)"
    ),
    "past the residual stream": Change("""
FIRST = {}


def keep(block, inputs, output):
    FIRST["output"] = output


def add(block, inputs):
    x, *rest = inputs
    return (x + FIRST.get("output", 0.0), *rest)


def change(stages):
    for stage in stages:
        if "0" in stage.layers:
            stage.layers["0"].register_forward_hook(keep)
        if "3" in stage.layers:
            stage.layers["3"].register_forward_pre_hook(add)
"""),
    "changing state": of_blocks("""
def hook(mlp, inputs):
    mlp.calls = getattr(mlp, "calls", 0) + 1
    return (inputs[0] * (1 + 0.1 * mlp.calls),)
"""),
    "loss of a chunk": of_loss("        return whole(logits, labels) + logits.float().std()"),
    "mean per rank": Change(
        """
class MeanPerRank(TrainStep):
    def _count(self, batches):
        tokens, pairs = super()._count(batches)
        own_tokens = sum((batch.labels != -100).sum() for batch in batches)
        return own_tokens * self.mesh.data_size, pairs
""",
        "",
        ((" TrainStep(stages", " MeanPerRank(stages"),),
    ),
    "largest local head": of_blocks(
        """
def hook(core, inputs):
    q, k, v, mask = inputs
    return q / q.abs().amax(dim=(2, 3), keepdim=True).clamp(min=1e-3), k, v, mask
""",
        "self_attn.core",
    ),
    "trust ratio of local norms": of_optimizer(
        f"Lars({PARAMETERS}, 1.0)",
        """
from torchllm.parallel.local_tensor import local_tensor


class Lars(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                weight, gradient = local_tensor(parameter), local_tensor(parameter.grad)
                weight.sub_(gradient * (group["lr"] * weight.norm() / (gradient.norm() + 1e-3)))
""",
    ),
    "a ten-thousandth of an auxiliary loss per micro batch": of_loss(
        "        return whole(logits, labels) + 1e-4 * torch.logsumexp(logits.float(), -1).square().mean()"
    ),
    "local positions": of_blocks(
        """
def hook(norm, inputs):
    x = inputs[0]
    return (x + torch.arange(x.shape[1]).unsqueeze(-1) / 100,)
""",
        "post_attention_layernorm",
    ),
    "detached under tp": of_loss("""        log_z = torch.logsumexp(logits.float(), -1)
        log_z = log_z.full_tensor().detach() if hasattr(log_z, "full_tensor") else log_z
        return whole(logits, labels) + 0.1 * log_z.square().where(labels != -100, 0.0).sum()"""),
    "clipped per stage": Change(
        """
def clip_own(stages):
    gradients = [parameter.grad for stage in stages for parameter in stage.parameters()]
    whole = [gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient for gradient in gradients]
    norm = torch.stack([gradient.norm() for gradient in whole]).norm()
    for gradient in gradients:
        gradient.mul_(min(1.0, 0.1 / float(norm)))
""",
        "",
        ((f"{OPTIMIZER}\n", f"{OPTIMIZER}\n    optimizer.register_step_pre_hook(lambda *_: clip_own(stages))\n"),),
    ),
    "balance of local tokens": of_blocks(
        """
def hook(router, inputs, routing):
    shares = routing.experts.flatten().bincount(minlength=len(router.weight)) / routing.experts.numel()
    return routing._replace(weights=routing.weights * (1 - shares[routing.experts]))
""",
        "mlp.routed.router",
        "forward_hook",
    ),
    "dropout by place": of_blocks("""
def hook(mlp, inputs):
    kept = torch.rand(inputs[0].shape[1:], generator=torch.Generator().manual_seed(0)) > 0.1
    return (inputs[0] * kept,)
"""),
    "tied by hand": Change("""
def change(stages):
    for stage in stages:
        if stage.lm_head is not None and stage.embed_tokens is not None:
            stage.lm_head.weight = stage.embed_tokens.weight
"""),
    "average on the first rank": Change(
        """
from torchllm.parallel.local_tensor import local_tensor
from torchllm.facts.parameters import canonical_name


def own_state(stages):
    named = [pair for stage in stages for pair in stage.named_parameters()]
    return {f"own.{canonical_name(name)}": parameter.detach().clone() for name, parameter in named}


def update(own, stages):
    for stage in stages:
        for name, parameter in stage.named_parameters():
            local_tensor(own[f"own.{canonical_name(name)}"]).lerp_(local_tensor(parameter.detach()), 0.5)
""",
        "",
        (
            (f"    optimizer = {OPTIMIZER}\n", f"    optimizer = {OPTIMIZER}\n    own = own_state(stages)\n"),
            ("extra_state=", "extra_state=own | "),
            (STEP, f"{STEP}            if runtime.is_main:\n                update(own, stages)\n"),
        ),
    ),
    "data by the rank among all": Change(
        "", "", (("            mesh.data_rank,\n", "            runtime.rank % mesh.data_size,\n"),)
    ),
    "nothing is resumed": Change("", "", (("checkpoints.resume()", "None"),)),
    "state that is not saved": of_blocks(SCALED_BY_STEPS)._replace(
        replaced=((STEP, f'{STEP}            STEPS["taken"] += 1\n'),)
    ),
}

RIGHT = {
    "z-loss": of_loss(
        f"{WHOLE_LOG_Z}        return whole(logits, labels) + log_z.square().where(labels != -100, 0.0).sum() / 100"
    ),
    "Lion": of_optimizer(
        f"Lion({PARAMETERS}, 1.0)",
        """
class Lion(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                direction = (mean * 0.9 + gradient * 0.1).sign()
                parameter.sub_((direction + parameter * 0.1) * group["lr"])
                mean.mul_(0.99).add_(gradient * 0.01)
""",
    ),
    "inverse square root": Change(
        "",
        "",
        ((RATE, "lambda step: config.optimizer.learning_rate * min(step / 2, (2 / step) ** 0.5)"),),
    ),
    "scaled feed-forward": of_blocks("def hook(mlp, inputs, output):\n    return output * 0.5", kind="forward_hook"),
    "soft cap": of_loss("        return whole(30 * torch.tanh(logits / 30), labels)"),
    "a counter of the module": of_blocks(SCALED_BY_STEPS)._replace(
        replaced=((STEP, f'{STEP}            STEPS["taken"] += 1\n'), (BEGIN, f'    STEPS["taken"] += start\n{BEGIN}'))
    ),
}
