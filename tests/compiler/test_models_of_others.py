"""Models and loops of libraries: stock's result bit for bit, or to rounding where that is all that is said."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradweave
from compiler.models import adamw, assert_identical


def train(make, objective, data, *, compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    optimizer = adamw(model.parameters())
    step = gradweave.compile(model, objective, optimizer, lower="replay") if compiled else None
    losses = []
    for batch in data:
        if step is not None:
            losses.append(step(*batch))
            continue
        losses.append(objective(model, *batch))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, torch.stack(losses).detach()


def test_a_language_model_of_transformers_that_is_given_labels(caplog):
    from transformers import GPT2Config, GPT2LMHeadModel

    def make():
        return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=2))

    def objective(model, ids):
        return model(ids, labels=ids).loss

    torch.manual_seed(1)
    data = [(torch.randint(0, 50, (2, 8)),) for _ in range(4)]
    stock = train(make, objective, data, compiled=False)
    with caplog.at_level(logging.WARNING, logger="gradweave"):
        made = train(make, objective, data, compiled=True)
    assert_identical(made, stock)
    assert not [r for r in caplog.records if "eagerly" in r.getMessage()], "it is one graph"


@pytest.mark.parametrize(("mode", "atol"), [("nearest", 0.0), ("bilinear", 1e-6), ("bicubic", 1e-6)])
def test_upsampling(mode, atol):
    torch.manual_seed(1)
    data = [(torch.randn(2, 3, 6, 6),) for _ in range(3)]

    def make():
        return nn.Sequential(nn.Conv2d(3, 3, 3), nn.Upsample(scale_factor=2, mode=mode), nn.Conv2d(3, 3, 1))

    def objective(model, x):
        return model(x).square().mean()

    stock, made = (train(make, objective, data, compiled=how) for how in (False, True))
    torch.testing.assert_close(made[2], stock[2], rtol=0, atol=atol)


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_a_lightning_module_that_steps_by_itself():
    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(1)
    x = torch.randn(32, 6)

    class Module(lightning.LightningModule):
        def __init__(self, *, compiled):
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = False
            self.net, self.compiled, self.losses = nn.Linear(6, 3), compiled, []

        def configure_optimizers(self):
            optimizer = adamw(self.net.parameters())
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)]

        def loss_of(self, net, x):
            return F.cross_entropy(net(x), x[:, :3].argmax(1))

        def on_train_start(self):
            if self.compiled:
                self.step = gradweave.compile(
                    self.net, self.loss_of, self.optimizers(), lower="replay", max_grad_norm=1
                )

        def training_step(self, batch):
            if self.compiled:
                loss = self.step(*batch)
            else:
                loss = self.loss_of(self.net, *batch)
                self.manual_backward(loss)
                self.clip_gradients(self.optimizers(), 1.0, "norm")
                self.optimizers().step()
                self.optimizers().zero_grad()
            self.lr_schedulers().step()
            self.losses.append(loss.detach())

    def run(*, compiled):
        module = Module(compiled=compiled)
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(TensorDataset(x), 8))
        return module.net, module.optimizers().optimizer, torch.stack(module.losses)

    assert_identical(run(compiled=True), run(compiled=False))


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_a_trainer_of_transformers_whose_training_step_is_compiled(tmp_path):
    import transformers

    transformers.logging.set_verbosity_error()
    words = [torch.randint(0, 31, (8,), generator=torch.Generator().manual_seed(number)) for number in range(32)]
    words = [{"input_ids": each, "labels": each} for each in words]

    class Trainer(transformers.Trainer):
        compiled = None

        def training_step(self, model, inputs, num_items_in_batch=None):
            if self.compiled is None:
                self.compiled = gradweave.compile(
                    model, loss_of_words, self.optimizer, lower="replay", max_grad_norm=self.args.max_grad_norm
                )
            return self.compiled(num_items_in_batch, **inputs)

    def loss_of_words(model, count, **inputs):
        return model(num_items_in_batch=count, **inputs).loss

    def run(trainer_class):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=31, n_positions=16)
        )
        optimizer = adamw(model.parameters())
        arguments = transformers.TrainingArguments(
            str(tmp_path), num_train_epochs=1, per_device_train_batch_size=4, report_to=[], use_cpu=True,
            save_strategy="no", logging_steps=1, disable_tqdm=True,
        )  # fmt: skip
        trainer = trainer_class(model, arguments, train_dataset=words, optimizers=(optimizer, None))
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        return trainer, (model, optimizer, torch.tensor([log["loss"] for log in logs])), logs[-1]["grad_norm"]

    _, expected, norm = run(transformers.Trainer)
    trainer, found, logged = run(Trainer)
    assert_identical(found, expected)
    assert logged == 0.0
    torch.testing.assert_close(float(trainer.compiled.grad_norm), norm)
