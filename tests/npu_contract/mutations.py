"""Call sites broken on purpose, in the text of `mindspeed_lite/ops/*/npu.py`: the test of the tests.

Each says which words of a problem must appear. No file is edited: runner.py executes the changed text in place of
the module. A mutation whose text is no longer in the source is an error, not a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

OPS = Path(__file__).resolve().parents[2] / "mindspeed_lite" / "ops"


@dataclass(frozen=True)
class Mutation:
    """In the backend of `operator` the text `old`, which stands there once, becomes `new`."""

    operator: str
    old: str
    new: str
    noticed: str

    def source(self) -> str:
        """The changed text; ValueError if `old` is not in the source exactly once."""
        text = (OPS / self.operator / "npu.py").read_text()
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.old!r} stands {text.count(self.old)} times in ops/{self.operator}/npu.py: the call site has "
                "changed, so change the mutation in tests/npu_contract/mutations.py with it"
            )
        return text.replace(self.old, self.new)


def _attention(old: str, new: str, noticed: str) -> Mutation:
    return Mutation("attention", old, new, noticed)


def _norm(old: str, new: str, noticed: str) -> Mutation:
    return Mutation("rms_norm", old, new, noticed)


_SCALE = "        scale=d**-0.5 if scale is None else scale,\n"
_NORM_CALL = "torch_npu.npu_rms_norm(rows, weight + 1 if zero_centered else weight, epsilon=eps)[0]"

MUTATIONS: Mapping[str, Mutation] = {
    # names
    "keyword of another operator": _attention("        scale=d", "        softmax_scale=d", "softmax_scale"),
    "keyword of the second version": _attention('"pre_tockens"', '"pre_tokens"', "pre_tokens"),
    "misspelt layout": _attention('input_layout="SBH"', 'input_layout="SBHD"', "input_layout is 'SBHD'"),
    "head_num by position": _attention("        head_num=n,\n", "        n,\n", "head_num not passed by name"),
    # heads
    "heads of all ranks": _attention("head_num=n,", "head_num=n * 2,", "head_num is 8: want 4"),
    "key heads": _attention("head_num=n,", "head_num=k.shape[2],", "head_num is 2: want 4"),
    "layout of batch first": _attention('input_layout="SBH"', 'input_layout="BSH"', "input_layout is BSH: want SBH"),
    "values not padded": _attention("width = max(d, dv)", "width = d", "larger than key heads"),
    # scale and dropout
    "scale left out": _attention(_SCALE, "", "scale is 1.0: want 0.125"),
    "scale of the padded head": _attention("scale=d**-0.5 if", "scale=width**-0.5 if", "want 0.125"),
    "scale of the caller ignored": _attention("d**-0.5 if scale is None else scale", "d**-0.5", "want 0.3"),
    "what to drop for what to keep": _attention("keep_prob=1.0 - dropout_p", "keep_prob=dropout_p", "keep_prob is 0.0"),
    # masks
    "polarity of the mask": _attention(
        '"atten_mask": hidden.expand', '"atten_mask": (~hidden).expand', "hide other keys than the caller asked for"
    ),
    "polarity of the triangle": _attention(".triu_(1)", ".tril_(0)", "atten_mask is not the triangle"),
    "triangle with the diagonal": _attention(".triu_(1)", ".triu_(0)", "atten_mask is not the triangle"),
    "smaller triangle": _attention("torch.ones(2048, 2048,", "torch.ones(1024, 1024,", "takes the compressed mask"),
    "triangle left out": _attention(
        '"atten_mask": _triangle(q.device),\n            "sparse_mode": _UPPER', '"sparse_mode": _UPPER',
        "mean nothing without atten_mask",
    ),
    "additive mask": _attention(
        "hidden.shape[1], sq, sk).contiguous()", "hidden.shape[1], sq, sk).contiguous().to(q.dtype)",
        "want bool or uint8",
    ),
    "mask not expanded": _attention(
        "hidden.expand(batches, hidden.shape[1], sq, sk).contiguous()", "hidden", "atten_mask is [2, 1, 1, 24]"
    ),
    "mask of one batch and all heads": _attention(
        "batches = b if hidden.shape[0] != 1 or hidden.shape[1] != 1 else 1", "batches = hidden.shape[0]",
        "atten_mask is [1, 4, 24, 24]",
    ),
    "band beside a mask lost": _attention(
        "hidden = hidden | band.hidden(sq, sk, positions, q.device)", "pass",
        "hide other keys than the caller asked for",
    ),
    "rows without keys": _attention("hidden = hidden & ~empty", "pass", "a row without visible keys"),
    # modes
    "compressed mode with a full mask": _attention(
        "_FULL_MASK, _UPPER_LEFT, _LOWER_RIGHT, _BAND = 1, 2", "_FULL_MASK, _UPPER_LEFT, _LOWER_RIGHT, _BAND = 2, 2",
        "takes the compressed mask",
    ),
    "upper left corner always": _attention(
        "_UPPER_LEFT if sq == sk else _LOWER_RIGHT", "_UPPER_LEFT", "hide other keys than the caller asked for"
    ),
    "causal for a band": _attention(
        '"sparse_mode": _BAND', '"sparse_mode": _LOWER_RIGHT', "mean nothing in sparse_mode 3"
    ),
    "band without its mode": _attention(
        '            "sparse_mode": _BAND,\n', "", "atten_mask is [2048, 2048]: want one of"
    ),
    "tokens exchanged": _attention(
        '"pre_tockens": left if left >= 0 else _UNLIMITED,\n            "next_tockens": right if right >= 0 else',
        '"next_tockens": left if left >= 0 else _UNLIMITED,\n            "pre_tockens": right if right >= 0 else',
        "hide other keys than the caller asked for",
    ),
    "no limit as minus one": _attention(
        '"pre_tockens": left if left >= 0 else _UNLIMITED', '"pre_tockens": left',
        "hide other keys than the caller asked for",
    ),
    # results
    "padding left in the output": _attention("out = out[..., :dv]", "pass", "the output is"),
    "statistic for the output": _attention("        **rest,\n    )[0]", "        **rest,\n    )[1]", ""),
    # gradients
    "gradient cut": _attention(
        "t.reshape(t.shape[0], t.shape[1], -1).contiguous()", "t.detach().reshape(t.shape[0], t.shape[1], -1)",
        "does not require grad",
    ),
    # normalisation
    "epsilon left out": _norm(", epsilon=eps", "", "epsilon is 1e-06: want 1e-05"),
    "epsilon by position": _norm("epsilon=eps", "eps", "epsilon not passed by name"),
    "epsilon by another name": _norm("epsilon=eps", "eps=eps", "eps"),
    "weight widened": _norm(
        "weight + 1 if zero_centered else weight, epsilon",
        "(weight + 1 if zero_centered else weight).float(), epsilon",
        "gamma is float32 and input bfloat16",
    ),
    "weight as a row": _norm(
        "weight + 1 if zero_centered else weight, epsilon", "(weight + 1 if zero_centered else weight)[None], epsilon",
        "gamma is",
    ),
    "any rank": _norm("x if 2 <= x.dim() <= 8 else x.reshape(-1, x.shape[-1])", "x", "want 2 to 8"),
    "rstd for the output": _norm("epsilon=eps)[0]", "epsilon=eps)[1]", ""),
    "torch's own operator": _norm(
        _NORM_CALL, "torch.nn.functional.rms_norm(rows, weight.shape, weight, eps)", "want ['npu_rms_norm']"
    ),
    "weight without gradient": _norm(
        "weight + 1 if zero_centered else weight, epsilon",
        "(weight + 1 if zero_centered else weight).detach(), epsilon",
        "the gradient of weight is None",
    ),
}  # fmt: skip
