"""Under the loops of Lightning, Accelerate and transformers: the same bits as without fusion, or a refusal in time."""

import logging
import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fusion.loops import adamw, assert_same, batches, loss_of, make_net
from gradweave.errors import GradweaveError
from gradweave.fusion import fuse

MODES = ["auto", "forward"]


@pytest.fixture(autouse=True)
def _their_warnings_are_theirs():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def loader(count):
    return DataLoader(list(batches(count)), batch_size=None)


# Lightning


def in_lightning(mode, *, where="on_fit_start", callbacks=(), **options):
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def configure_optimizers(self):
            optimizer = adamw(self.net)
            if mode and where == "configure_optimizers":
                fuse(self.net, optimizer, mode)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)}

        def on_fit_start(self):
            if mode and where == "on_fit_start":
                fuse(self, self.optimizers(), mode)

        def training_step(self, batch):
            return loss_of(self.net, *batch)

        def validation_step(self, batch):
            self.log("loss", loss_of(self.net, *batch))

    module = Module()
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[make() for make in callbacks], **options,
    )  # fmt: skip
    trainer.fit(module, loader(12), loader(2))
    return module.net, module.optimizers().optimizer


def accumulation_that_begins_later():
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    return GradientAccumulationScheduler({0: 1, 1: 2})


def averaged_weights():
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    return StochasticWeightAveraging(1e-2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [
        {"callbacks": [accumulation_that_begins_later]},
        {"callbacks": [averaged_weights], "where": "configure_optimizers"},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "precision": "bf16-mixed"},
    ],
    ids=["accumulation that begins later", "averaged weights", "clipped, accumulated, in bfloat16"],
)
def test_a_trainer_of_lightning(mode, options):
    assert_same(in_lightning(mode, **options), in_lightning(None, **options))


# Accelerate


def in_accelerate(mode, *, prepared_first=True, accumulate=1, clip_from=math.inf, skipped=()):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = make_net()
    optimizer = adamw(model)
    if mode and not prepared_first:
        fuse(model, optimizer, mode)
    trained, stepped, data = accelerator.prepare(model, optimizer, loader(30))
    if mode and prepared_first:
        fuse(trained, stepped, mode)
    norms = []
    for number, batch in enumerate(data):
        with accelerator.accumulate(trained):
            stepped.zero_grad()
            loss = loss_of(trained, *batch) * (math.nan if number in skipped else 1.0)
            accelerator.backward(loss)
            if not torch.isfinite(loss):
                continue
            if accelerator.sync_gradients and number >= clip_from:
                norms.append(float(accelerator.clip_grad_norm_(trained.parameters(), 0.05)))
            stepped.step()
    return (model, optimizer), norms


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [{"accumulate": 4, "clip_from": 0}, {"clip_from": 11, "prepared_first": False}, {"skipped": (3, 17, 21)}],
    ids=["accumulated, clipped", "clipped from the 11th step", "losses that are not finite are skipped"],
)
def test_a_loop_of_accelerate(mode, options):
    found, norms = in_accelerate(mode, **options)
    expected, stock_norms = in_accelerate(None, **options)
    assert_same(found, expected)
    assert norms == stock_norms


# transformers


class Words(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, number):
        words = torch.randint(0, 31, (8,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": words, "labels": words}


def in_transformers(folder, mode, *, by_callback=False, **options):
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=31, n_positions=16)
    )
    optimizer = adamw(model)
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()

    class Fuse(transformers.TrainerCallback):
        def on_train_begin(self, *_, model=None, optimizer=None, **__):
            fuse(model, optimizer, mode)

    if mode and not by_callback:
        fuse(model, optimizer, mode)
    arguments = transformers.TrainingArguments(
        str(folder), num_train_epochs=2, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        save_strategy="no", logging_steps=1, disable_tqdm=True, eval_strategy="epoch", **options,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Words(), eval_dataset=Words(), optimizers=(optimizer, None),
        callbacks=[Fuse()] if mode and by_callback else [],
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    try:
        trainer.train()
    except GradweaveError as error:
        return str(error), not torch.equal(start, nn.utils.parameters_to_vector(model.parameters()))
    return (model, optimizer), [
        (log.get("loss"), log.get("grad_norm"), log.get("eval_loss")) for log in trainer.state.log_history
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("by_callback", [False, True])
def test_a_trainer_of_transformers_which_clips_accumulates_and_evaluates(tmp_path, mode, by_callback):
    found, logged = in_transformers(tmp_path, mode, by_callback=by_callback, gradient_accumulation_steps=2)
    expected, stock_logged = in_transformers(tmp_path, None, gradient_accumulation_steps=2)
    assert_same(found, expected)
    assert logged == stock_logged


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0}])
def test_a_trainer_of_transformers_takes_the_norm_and_so_refuses_backward(tmp_path, options):
    message, moved = in_transformers(tmp_path, "backward", **options)
    assert "no weight has been changed" in message
    assert not moved
