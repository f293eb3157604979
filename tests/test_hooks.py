"""Hooks on modules and autograd, with a stand-in for the extension that notes what it is told. No extension needed."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from echo_pg import build, passes


# -------------------------------------------------------------------------------------------------------------------
class Recorder:
    """Stands for the extension: notes enter and exit with the depth at which they come."""

    def __init__(self):
        self.depth, self.events, self.hooked = 0, [], None

    def module_enter(self, role):
        self.depth += 1
        self.events.append((self.depth, role))
        return self.depth

    def module_exit(self):
        self.depth -= 1

    def backward_enter(self):
        self.events.append("backward")

    def backward_exit(self):
        self.events.append("backward ends")

    def set_hooks_installed(self, installed):
        self.hooked = installed


@pytest.fixture(autouse=True)
def real_hooks_set_aside():
    """Those of a group that an earlier test made in this process."""
    installed = bool(passes._handles)
    if installed:
        passes.uninstall(build.extension())
    yield
    if installed:
        passes.install(build.extension())


@pytest.fixture
def recorder():
    made = Recorder()
    passes.install(made)
    yield made
    passes.uninstall(made)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.body = nn.Linear(4, 4)
        self.lm_head = nn.Sequential(nn.Linear(4, 8))

    def forward(self, tokens):
        return self.lm_head(self.body(self.embed(tokens)))


TOKENS = torch.tensor([1, 2])


def test_depth_and_roles(recorder):
    model = nn.ModuleDict({"wrapped": Model()})["wrapped"]
    model(TOKENS)
    plain, embedding, output = passes.PLAIN, passes.EMBEDDING, passes.OUTPUT
    assert recorder.events == [(1, plain), (2, embedding), (2, plain), (2, output), (3, output)]
    assert recorder.depth == 0 and recorder.hooked is True


def test_output_layer_that_only_the_model_knows(recorder):
    class Named(Model):
        def __init__(self):
            super().__init__()
            self.unembed = self.lm_head
            del self.lm_head

        def get_output_embeddings(self):
            return self.unembed

        def forward(self, tokens):
            return self.unembed(self.embed(tokens))

    model = Named()
    model(TOKENS)
    assert recorder.events[-2:] == [(2, passes.OUTPUT), (3, passes.OUTPUT)]


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("VocabParallelEmbedding", passes.EMBEDDING),
        ("LmHeadLinearAllreduce", passes.OUTPUT),
        ("ParallelLMHead", passes.OUTPUT),
        ("RecursiveScriptModule", passes.OPAQUE),
        ("OptimizedModule", passes.PLAIN),  # with nothing inside
        ("RowParallelLinear", passes.PLAIN),
        ("DeepSpeedMLP", passes.RESIDUAL),
        ("DominoModule", passes.ALTERNATING),
    ],
)
def test_roles_by_class_name(name, role):
    assert passes.role_of(type(name, (nn.Module,), {})()) == role


def test_an_exception_leaves_no_module_open(recorder):
    model = Model()
    with pytest.raises(IndexError):
        model(torch.tensor([99]))
    with pytest.raises(TypeError):
        model()
    assert recorder.depth == 0


def test_models_are_neither_marked_nor_kept_alive(recorder):
    model = Model()
    before = set(vars(model.lm_head))
    model(TOKENS)
    assert set(vars(model.lm_head)) == before and passes._output_layers and passes._scanned_roots
    del model
    gc.collect()
    assert not passes._output_layers and not passes._scanned_roots


def test_backward_and_recomputation(recorder):
    model = Model()
    hidden = checkpoint(model.body, model.embed(TOKENS), use_reentrant=False)
    recorder.events.clear()
    hidden.sum().backward()
    assert recorder.events == ["backward", (1, passes.PLAIN), "backward ends"]
    recorder.events.clear()
    torch.autograd.grad(model(TOKENS).sum(), model.body.weight)
    assert recorder.events[-2:] == ["backward", "backward ends"] and recorder.depth == 0
    leaf = torch.ones(1, requires_grad=True)
    with pytest.raises(RuntimeError):
        leaf.detach().sum().backward()
    assert recorder.events[-1] == "backward ends"


def test_uninstalling_restores_torch():
    before, compile_before = torch.autograd.graph._engine_run_backward, nn.Module.compile
    made = Recorder()
    passes.install(made)
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward is not before
    passes.uninstall(made)
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward is before
    assert nn.Module.compile is compile_before
    Model()(TOKENS)
    assert made.events == [] and made.hooked is False


def test_hooks_do_not_break_a_compiled_graph(recorder):
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager", fullgraph=True)
    model(torch.ones(2, 4))
    recorder.events.clear()
    model(torch.ones(2, 4)).sum().backward()
    assert recorder.events == [(1, passes.PLAIN), "backward", "backward ends"] and recorder.depth == 0


class Summing(nn.Embedding):
    """An embedding that may sum over ranks, for all that its class tells."""


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_modules_are_opaque_where_an_embedding_may_sum_in_them(recorder, in_place):
    whole = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    hooked = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    hooked[0].register_forward_hook(lambda *_: None)
    split = nn.Sequential(Summing(8, 4), nn.Linear(4, 4))
    roles = []
    for model in whole, hooked, split:
        if in_place:
            model.compile(backend="eager")
        else:
            model = torch.compile(model, backend="eager")
        for _ in range(2):
            recorder.events.clear()
            model(TOKENS)
        assert recorder.depth == 0
        roles.append(list(recorder.events))
    assert roles == [[(1, passes.PLAIN)], [(1, passes.OPAQUE)], [(1, passes.OPAQUE)]]


def test_an_embedding_compiled_in_place_keeps_its_role(recorder):
    model = Model()
    model.embed.compile(backend="eager")
    model(TOKENS)
    assert recorder.events[1] == (2, passes.EMBEDDING)
