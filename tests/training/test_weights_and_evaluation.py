import pytest
import torch
import torchvision
from torch import nn

from vitprobe.training import evaluate, load_weights


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5))


def changed(model):
    for value in model.state_dict().values():
        value.add_(1)
    return model


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": {"state_dict": state}},
        lambda state: {f"module.{name}": value for name, value in state.items()},
        lambda state: {"state_dict": {f"module._orig_mod.{name}": value for name, value in state.items()}},
        lambda state: {f"_orig_mod.module.{name}": value for name, value in state.items()},
        lambda state: {name.replace(".", ".module.", 1): value for name, value in state.items()},
    ],
)
@pytest.mark.parametrize("from_file", [True, False])
def test_weights_from_every_kind_of_checkpoint(wrap, from_file, tmp_path):
    expected = changed(network()).state_dict()
    source = wrap(expected)
    if from_file:
        torch.save(source, tmp_path / "weights.pt")
        source = tmp_path / "weights.pt"
    model = network()
    load_weights(model, source)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_weights_into_wrapped_models():
    expected = changed(network()).state_dict()
    model = network()
    load_weights(torch.compile(nn.DataParallel(model)), expected)
    assert torch.equal(model[0].weight, expected["0.weight"])


def test_misfits_are_listed():
    state = network().state_dict()
    state["head.weight"] = state.pop("3.weight")
    state["0.weight"] = torch.zeros(4, 1, 3, 3)
    with pytest.raises(ValueError) as error:
        load_weights(network(), state)
    message = str(error.value)
    assert "missing: 3.weight" in message and "unexpected: head.weight" in message
    assert "other shape: 0.weight (4, 1, 3, 3) instead of (4, 3, 3, 3)" in message


def test_counters_that_old_checkpoints_lack_are_no_misfit():
    state = {name: value for name, value in network().state_dict().items() if "num_batches" not in name}
    load_weights(network(), state)


def test_no_state_dict_is_said(tmp_path):
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="holds a list, not a state dict"):
        load_weights(network(), tmp_path / "list.pt")


def test_a_pickle_that_runs_code_is_not_loaded(tmp_path):
    torch.save(network(), tmp_path / "module.pt")
    with pytest.raises(ValueError, match=r"weights_only=True \(UnpicklingError\), which runs no code: .*state_dict"):
        load_weights(network(), tmp_path / "module.pt")


def test_what_is_no_file_of_weights_is_said(tmp_path):
    (tmp_path / "garbage.pt").write_bytes(bytes(range(200)))
    with pytest.raises(ValueError, match=r"garbage.pt cannot be loaded .*it is damaged, or holds more than weights"):
        load_weights(network(), tmp_path / "garbage.pt")
    with pytest.raises(ValueError, match=r"is a folder: give the file .*checkpoint.pt"):
        load_weights(network(), tmp_path)
    with pytest.raises(FileNotFoundError):
        load_weights(network(), tmp_path / "gone.pt")


def test_evaluation_is_the_mean_over_images():
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    images, labels = torch.randn(11, 4).double(), torch.randint(3, (11,))
    found = evaluate(model, list(zip(images.split(4), labels.split(4), strict=True)))
    losses = nn.functional.cross_entropy(model(images), labels, reduction="none").detach()
    assert found.images == 11
    assert found.nll == pytest.approx(losses.mean().item(), rel=1e-12)
    assert found.nll_se == pytest.approx(losses.std().item() / 11**0.5, rel=1e-9)
    right = (model(images).argmax(1) == labels).double().mean().item()
    assert found.accuracy == pytest.approx(right)
    assert found.accuracy_se == pytest.approx((right * (1 - right) / 11) ** 0.5)


def test_evaluation_takes_the_logarithm_of_the_softmax():
    logits = nn.Identity()
    found = evaluate(logits, [(torch.tensor([[0.0, 500.0]]), torch.tensor([0]))])
    assert found.nll == pytest.approx(500)


def test_evaluation_uses_evaluation_mode_and_restores_every_mode():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.9), nn.Linear(3, 2))
    model.train()
    model[1].eval()
    modes = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    batch = [(torch.randn(8, 3), torch.zeros(8, dtype=torch.long))]
    assert evaluate(model, batch) == evaluate(model, batch)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_evaluation_reads_outputs_of_other_libraries():
    class Output:
        logits = torch.tensor([[1.0, 0.0]])

    class Model(nn.Module):
        def __init__(self, output):
            super().__init__()
            self.output = output

        def forward(self, x):
            return self.output

    batch = [(torch.zeros(1, 1), torch.tensor([0]), "more")]
    for output in (Output(), (Output.logits, None)):
        assert evaluate(Model(output), batch).accuracy == 1


def test_evaluation_refuses_nothing_and_soft_labels():
    with pytest.raises(ValueError, match="no images"):
        evaluate(nn.Identity(), [])
    with pytest.raises(ValueError, match="class numbers"):
        evaluate(nn.Identity(), [(torch.zeros(2, 2), torch.zeros(2, 2))])


def test_modules_that_ask_for_their_version_are_loaded():
    """torchvision's MNASNet refuses a state dict without the versions that wrappers and plain dicts lose."""
    source, model = (torchvision.models.mnasnet0_5(num_classes=3) for _ in range(2))
    load_weights(model, {"state_dict": {f"module.{name}": value for name, value in source.state_dict().items()}})
    pairs = zip(source.state_dict().values(), model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
