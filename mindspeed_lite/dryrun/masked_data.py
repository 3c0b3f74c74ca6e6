"""Serves BERT's and T5's data sets, which Megatron cannot make without files: one sample of full length."""

from __future__ import annotations

import importlib
from typing import Any

import torch

_PACKAGE = "megatron.core.datasets"
_TOKEN = 2  # any word


class WordPieces:
    """Tokenizer of masked data without files, as far as the data sets ask it."""

    pad, mask = 0, 1
    cls = sep = bos = eos = eod = _TOKEN
    additional_special_tokens_ids = tuple(range(1 << 16))

    def __init__(self, tokenizer: Any) -> None:
        self.vocab_size = tokenizer.vocab_size
        self.inv_vocab = dict.fromkeys(range(self.vocab_size), "word")


class RepeatedSample(torch.utils.data.Dataset[Any]):
    """A data set's own sample, made of one document of two sentences, `size` times."""

    def __init__(self, kind: Any, config: Any, size: int) -> None:
        length = config.sequence_length - 3  # BERT's longest
        source = kind.__new__(kind)
        source.config, source._pad_token_id, source.token_lookup = config, -1, [_TOKEN]
        source.dataset = [[_TOKEN] * (length // 2), [_TOKEN] * (length - length // 2)]
        source.sample_index = [(0, 2, length)]
        self._sample, self._size = source[0], size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return self._sample


def install() -> None:
    builder = importlib.import_module(f"{_PACKAGE}.blended_megatron_dataset_builder").BlendedMegatronDatasetBuilder
    masked = importlib.import_module(f"{_PACKAGE}.masked_dataset")
    check, build = masked.MaskedWordPieceDatasetConfig.__post_init__, builder.build

    def __post_init__(self: Any) -> None:
        self.tokenizer = WordPieces(self.tokenizer)
        check(self)

    def build_repeated(self: Any) -> Any:
        if not issubclass(self.cls, masked.MaskedWordPieceDataset):
            return build(self)
        is_here = self.is_built_on_rank()
        return [RepeatedSample(self.cls, self.config, size) if is_here and size else None for size in self.sizes]

    masked.MaskedWordPieceDatasetConfig.__post_init__, builder.build = __post_init__, build_repeated
