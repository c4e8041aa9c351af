"""Models of transformers and torch.nn in their smallest form: stock's training bit for bit, and which are one graph."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from compiler.models import adamw, assert_identical, both

STEPS = 4
WORDS = 40
SMALL = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {**SMALL, "vocab_size": WORDS, "max_position_embeddings": 16}
DECODER = {**TEXT, "num_key_value_heads": 1, "pad_token_id": 0}
IMAGES = {**SMALL, "image_size": 8, "patch_size": 4}
TWO_SIDES = {
    "d_model": 8, "vocab_size": WORDS, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
}  # fmt: skip


def drawn(make):
    """A batch for each step, from a generator of its own."""
    generator = torch.Generator().manual_seed(1)
    return [make(generator) for _ in range(STEPS)]


def words(generator, most=WORDS):
    return torch.randint(3, most, (2, 6), generator=generator)


def floats(*shape):
    return drawn(lambda generator: (torch.randn(shape, generator=generator),))


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT))


def gpt2():
    config = transformers.GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))


def qwen2():
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DECODER))


def t5():
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def distilbert():
    config = transformers.DistilBertConfig(
        vocab_size=WORDS, dim=8, hidden_dim=16, n_layers=1, n_heads=2, max_position_embeddings=16
    )
    return transformers.DistilBertForMaskedLM(config)


def mixtral():
    config = transformers.MixtralConfig(
        **DECODER, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
    )
    return transformers.MixtralForCausalLM(config)


def mamba():
    config = transformers.MambaConfig(
        vocab_size=WORDS, hidden_size=8, state_size=4, num_hidden_layers=1, time_step_rank=2
    )
    return transformers.MambaForCausalLM(config)


def vit():
    return transformers.ViTForImageClassification(transformers.ViTConfig(**IMAGES, num_labels=2))


def whisper():
    config = transformers.WhisperConfig(
        **TWO_SIDES, num_mel_bins=4, max_source_positions=4, max_target_positions=16, decoder_start_token_id=1,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def clip():
    text = {**TEXT, "eos_token_id": 2}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=IMAGES, projection_dim=8))


def wav2vec2():
    config = transformers.Wav2Vec2Config(
        **SMALL, vocab_size=8, conv_dim=(4, 4), conv_stride=(4, 4), conv_kernel=(4, 4), num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.0,
    )  # fmt: skip
    return transformers.Wav2Vec2ForCTC(config)


def with_labels(model, batch):
    return model(input_ids=batch, labels=batch).loss


def with_padding(model, batch):
    return model(input_ids=batch, attention_mask=(batch > 8).long(), labels=batch).loss


def of_pictures(model, batch, labels):
    return model(pixel_values=batch, labels=labels).loss


def of_sound(model, batch, labels):
    return model(input_features=batch, labels=labels).loss


def of_spelling(model, batch, labels):
    return model(batch, labels=labels).loss


def of_both(model, pictures, batch):
    return model(input_ids=batch, pixel_values=pictures, return_loss=True).loss


def mean_square(model, *batch):
    return model(*batch).square().mean()


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, tgt_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner = kind(6, 8, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.inner(x)[0])


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, [5, 3, 2], batch_first=True)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.inner(packed)[0], batch_first=True)[0])


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.EmbeddingBag(WORDS, 6, mode="mean"), nn.Linear(6, 3)

    def forward(self, batch):
        return self.head(self.inner(batch))


class Spelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Conv1d(6, 8, 3, padding=1), nn.Linear(8, 10)

    def forward(self, x):
        return self.head(torch.relu(self.inner(x)).permute(2, 0, 1)).log_softmax(-1)


def connectionist(model, x):
    targets = torch.ones(2, 3, dtype=torch.long)
    return F.ctc_loss(model(x), targets, torch.tensor([12, 12]), torch.tensor([3, 2]))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + self.inner(x, x, x, need_weights=False)[0])


class Spectral(nn.Module):
    """A filter of complex weights between Fourier transforms."""

    def __init__(self):
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(5, dtype=torch.complex64)), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=8))


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * (s + x * s * (1 - s))


class OwnBackward(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.two(Swish.apply(self.one(x)))


@dataclass(frozen=True)
class Case:
    """A model, its loss, its batches, and what keeps it from being one graph; None if it is one."""

    make: Any
    objective: Any
    data: Any
    in_the_way: str | None = None


SENTENCES = drawn(lambda generator: (words(generator),))
PICTURES = drawn(lambda g: (torch.randn(2, 3, 8, 8, generator=g), torch.randint(0, 2, (2,), generator=g)))
SOUND = drawn(lambda g: (torch.randn(2, 4, 8, generator=g), words(g)))
WAVES = drawn(lambda g: (torch.randn(2, 160, generator=g), torch.randint(1, 8, (2, 3), generator=g)))
PAIRS = drawn(lambda g: (torch.randn(2, 3, 8, 8, generator=g), words(g)))
CASES = {
    "BERT": Case(bert, with_labels, SENTENCES),
    "BERT, padded": Case(bert, with_padding, SENTENCES),
    "GPT-2": Case(gpt2, with_labels, SENTENCES),
    "Llama": Case(llama, with_labels, SENTENCES),
    "Qwen2": Case(qwen2, with_labels, SENTENCES),
    "T5": Case(t5, with_labels, SENTENCES),
    "DistilBERT": Case(distilbert, with_labels, SENTENCES),
    "Mixtral": Case(mixtral, with_labels, SENTENCES),
    "Mamba": Case(mamba, with_labels, SENTENCES),
    "ViT": Case(vit, of_pictures, PICTURES),
    "Whisper": Case(whisper, of_sound, SOUND),
    "CLIP": Case(clip, of_both, PAIRS),
    "wav2vec 2.0": Case(wav2vec2, of_spelling, WAVES, "Data-dependent branching"),
    "nn.Transformer": Case(Transformer, mean_square, floats(2, 5, 8), "data-dependent expression"),
    "LSTM": Case(lambda: Recurrent(nn.LSTM), mean_square, floats(3, 4, 6)),
    "GRU": Case(lambda: Recurrent(nn.GRU), mean_square, floats(3, 4, 6)),
    "packed LSTM": Case(Packed, mean_square, floats(3, 5, 6), "marked as skipped"),
    "EmbeddingBag": Case(Bags, mean_square, SENTENCES),
    "Conv1d and CTC": Case(Spelled, connectionist, floats(2, 6, 12), "Dynamic shape operator"),
    "MultiheadAttention": Case(Attention, mean_square, floats(2, 5, 8)),
    "Fourier": Case(Spectral, mean_square, floats(4, 8)),
    "autograd.Function": Case(OwnBackward, mean_square, floats(4, 6)),
}


@pytest.mark.filterwarnings("ignore")  # transformers' own, and nn.Transformer's
@pytest.mark.parametrize("name", CASES)
def test_a_model_is_trained_as_by_stock_bit_for_bit(name, warned):
    case = CASES[name]
    made, expected, step = both(case.make, case.objective, case.data, make_optimizer=adamw)
    assert_identical(made, expected)
    if case.in_the_way is None:
        assert step.eager_reason is None
        assert not warned()
    else:
        assert case.in_the_way in step.eager_reason
        assert len(warned()) == 1
