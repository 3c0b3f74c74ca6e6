"""What is documented of each torch_npu operator that we use, as checks over a recorded call.

`violations(call)` returns every sentence of the documentation that the call breaks. Most of them break nothing in
the wheel itself: it passes on what it gets, and only CANN on a device would notice, or nobody. An operator
without an entry in CONTRACTS is a violation too, so that none is used unchecked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tests.npu_contract.recorder import TRIANGLE, Call, Tensor

DTYPES = ("float16", "bfloat16", "float32")
LAYOUTS = ("SBH", "BSH", "BSND", "BNSD", "TND")
UNLIMITED = 2147483647
LANES = 8

FULL_TOKENS, FULL_MASK, UPPER_LEFT, LOWER_RIGHT, BAND = 0, 1, 2, 3, 4
COMPRESSED = (UPPER_LEFT, LOWER_RIGHT, BAND)


class Sizes(NamedTuple):
    """Of one attention call. In layout TND b is 1 and the lengths are totals."""

    b: int
    sq: int
    sk: int
    n: int
    g: int
    d: int
    dv: int


def violations(call: Call) -> list[str]:
    """Every sentence of the operator's contract that `call` breaks."""
    contract = CONTRACTS.get(call.operator)
    if contract is None:
        return [f"{call.operator} has no contract: write one in tests/npu_contract/contracts.py"]
    return [f"{call.operator}: {violation}" for violation in contract(call)]


# ---- attention ----


def fusion_attention(call: Call) -> Iterator[str]:
    """npu_fusion_attention(query, key, value, head_num, input_layout, ...) -> out, max, sum, softmax_in, 3 ints"""
    a = call.arguments
    yield from _by_name(call, "head_num", "input_layout", "scale", "keep_prob")
    yield from _attention_inputs(call)
    if not 0.0 < a["keep_prob"] <= 1.0:
        yield f"keep_prob is {a['keep_prob']}: want the probability to keep, in (0, 1]"
    sizes = sizes_of(call)
    if isinstance(sizes, str):
        yield sizes
        return
    yield from _sizes(sizes, a["input_layout"])
    yield from _mask(call, sizes)
    yield from _lengths(call)
    if call.results is not None:
        q = a["query"]
        shape = (*q.shape[:-1], sizes.n * sizes.dv if a["input_layout"] in ("SBH", "BSH") else sizes.dv)
        yield from _is("result 0 (out)", call.results[0], q.dtype, shape)
        for position, name in ((1, "softmax_max"), (2, "softmax_sum")):
            yield from _is(f"result {position} ({name})", call.results[position], "float32", _statistic(call, sizes))


def fusion_attention_grad(call: Call) -> Iterator[str]:
    """npu_fusion_attention_grad(query, key, value, dy, head_num, ..., softmax_max, softmax_sum, attention_in)"""
    a = call.arguments
    yield from _attention_inputs(call)
    sizes = sizes_of(call)
    if isinstance(sizes, str):
        yield sizes
        return
    yield from _mask(call, sizes)
    yield from _lengths(call)
    for name in ("softmax_max", "softmax_sum"):
        yield from _is(name, a[name], "float32", _statistic(call, sizes))
    yield from _is("attention_in", a["attention_in"], a["query"].dtype, a["dy"].shape)
    for position, name in enumerate(("query", "key", "value")):
        if call.results is not None:
            yield from _is(f"gradient of {name}", call.results[position], a[name].dtype, a[name].shape)


def sizes_of(call: Call) -> Sizes | str:
    """The sizes of an attention call by its layout and head_num, or why they make no sense."""
    a = call.arguments
    q, k, v, n, layout = (a[name] for name in ("query", "key", "value", "head_num", "input_layout"))
    if layout not in LAYOUTS:
        return f"input_layout is {layout!r}: want one of {', '.join(LAYOUTS)}"
    for name, t in (("query", q), ("key", k), ("value", v)):
        if t.dim != len(layout):
            return f"{name} is {t}: layout {layout} has {len(layout)} dimensions"
    if type(n) is not int or n < 1:
        return f"head_num is {n!r}: want the number of query heads on this rank, a Python int"
    if layout in ("SBH", "BSH"):
        if q.shape[2] % n:
            return f"head_num {n} does not divide the last dimension of query {q}"
        d = q.shape[2] // n
        g, left = divmod(k.shape[2], d)
        if left or not g or v.shape[2] % g:
            return f"key {k} and value {v} do not consist of heads of size {d} (query {q} over {n} heads)"
        dv = v.shape[2] // g
        s, b = (0, 1) if layout == "SBH" else (1, 0)
    else:
        s, b, heads = {"BSND": (1, 0, 2), "BNSD": (2, 0, 1), "TND": (0, None, 1)}[layout]
        if q.shape[heads] != n:
            return f"head_num is {n} and query {q} has {q.shape[heads]} heads"
        if k.shape[heads] != v.shape[heads] or k.shape[-1] != q.shape[-1]:
            return f"query {q}, key {k} and value {v} do not fit each other"
        g, d, dv = k.shape[heads], q.shape[-1], v.shape[-1]
    if b is not None and not q.shape[b] == k.shape[b] == v.shape[b]:
        return f"query {q}, key {k} and value {v} differ in batch (layout {layout})"
    if k.shape[s] != v.shape[s]:
        return f"key {k} and value {v} differ in length (layout {layout})"
    return Sizes(1 if b is None else q.shape[b], q.shape[s], k.shape[s], n, g, d, dv)


def _attention_inputs(call: Call) -> Iterator[str]:
    tensors = [call.arguments[name] for name in ("query", "key", "value")]
    if len({t.dtype for t in tensors}) > 1 or tensors[0].dtype not in DTYPES:
        yield f"query, key and value are {', '.join(t.dtype for t in tensors)}: want one of {', '.join(DTYPES)} for all"


def _sizes(sizes: Sizes, layout: str) -> Iterator[str]:
    if sizes.g < 1 or sizes.n % sizes.g:
        yield f"{sizes.g} key heads do not divide {sizes.n} query heads"
    if sizes.n > 256:
        yield f"{sizes.n} heads: at most 256"
    if sizes.d > 768:
        yield f"head size {sizes.d}: at most 768"
    if sizes.dv > sizes.d:
        yield f"value heads ({sizes.dv}) are larger than key heads ({sizes.d})"


def _mask(call: Call, sizes: Sizes) -> Iterator[str]:
    a = call.arguments
    mask, mode = a["atten_mask"], a["sparse_mode"]
    tokens = (a["pre_tockens"], a["next_tockens"])
    if mode not in (FULL_TOKENS, FULL_MASK, *COMPRESSED):
        yield f"sparse_mode {mode} has no contract yet (0 to 4 have)"
        return
    if mask is None:
        # Documented: without a mask neither the mode nor the tokens count.
        if mode != FULL_TOKENS or tokens != (UNLIMITED, UNLIMITED):
            yield f"sparse_mode {mode} and tokens {tokens} mean nothing without atten_mask"
        return
    if mask.dtype not in ("bool", "uint8"):
        yield f"atten_mask is {mask.dtype}: want bool or uint8, True where a key is hidden"
    b, sq, sk, n = sizes.b, sizes.sq, sizes.sk, sizes.n
    if mode in COMPRESSED:
        if mask.shape != TRIANGLE:
            yield f"atten_mask is {list(mask.shape)}: sparse_mode {mode} takes the compressed mask, {list(TRIANGLE)}"
        elif mask.content == "other":
            yield f"atten_mask is not the triangle that sparse_mode {mode} takes, True above the diagonal"
    else:
        allowed = [(b, n, sq, sk), (b, 1, sq, sk), (1, 1, sq, sk), (sq, sk)]
        if mask.shape not in allowed:
            yield f"atten_mask is {list(mask.shape)}: want one of {', '.join(str(list(shape)) for shape in allowed)}"
    if mode in (FULL_MASK, UPPER_LEFT, LOWER_RIGHT) and tokens != (UNLIMITED, UNLIMITED):
        yield f"tokens {tokens} mean nothing in sparse_mode {mode}"
    if mode in (FULL_TOKENS, BAND) and sum(tokens) < 0:
        yield f"pre_tockens {tokens[0]} and next_tockens {tokens[1]} leave no key"


def _lengths(call: Call) -> Iterator[str]:
    a = call.arguments
    names = (("actual_seq_qlen", "query"), ("actual_seq_kvlen", "key"))
    if a["input_layout"] != "TND":
        for name, _ in names:
            if a[name]:
                yield f"{name} belongs to layout TND, not to {a['input_layout']}"
        return
    for name, tensor in names:
        yield from cumulative_ends(name, a[name], a[tensor].shape[0])
    counts = {len(a[name]) for name, _ in names if isinstance(a[name], (list, tuple))}
    if len(counts) > 1:
        yield "actual_seq_qlen and actual_seq_kvlen differ in length"


def _statistic(call: Call, sizes: Sizes) -> tuple[int, ...]:
    if call.arguments["input_layout"] == "TND":
        return (sizes.sq, sizes.n, LANES)
    return (sizes.b, sizes.n, sizes.sq, LANES)


# ---- lists of lengths ----


def cumulative_ends(name: str, values: Sequence[int] | None, total: int) -> Iterator[str]:
    """Ends of consecutive pieces as Python ints: no leading zero, ascending, the last one is the total."""
    if not isinstance(values, (list, tuple)) or not values or any(type(value) is not int for value in values):
        yield f"{name} is {values!r}: want the cumulative ends as a list of Python ints"
        return
    if values[0] == 0:
        yield f"{name} {list(values)} has a leading zero: it lists ends only"
    if list(values) != sorted(values) or values[-1] != total:
        yield f"{name} {list(values)} is not cumulative to {total}"


def group_list(name: str, values: Sequence[int], kind: int, total: int) -> Iterator[str]:
    """Rows of each group, int64 on the device: ends (kind 0) or counts (kind 1) that make up `total` rows."""
    if kind == 0:
        yield from cumulative_ends(name, list(values), total)
    elif kind == 1:
        if any(value < 0 for value in values) or sum(values) != total:
            yield f"{name} {list(values)} are not counts: they add up to {sum(values)}, not to {total} rows"
    else:
        yield f"group_list_type is {kind}: 0 for cumulative ends, 1 for counts"


def grouped_matmul(call: Call) -> Iterator[str]:
    """npu_grouped_matmul([x], [weight], group_list=, split_item=, group_type=, group_list_type=) -> [out]

    x [M, K] and weight [E, K, N] with group_type 0 (rows in groups), one tensor in each list.
    """
    a = call.arguments
    yield from _by_name(call, "group_list", "split_item", "group_type", "group_list_type")
    if len(a["x"]) != 1 or len(a["weight"]) != 1 or a["group_type"] != 0 or a["x"][0].dim != 2:
        yield "only group_type 0 with one x [M, K] and one weight [E, K, N] has a contract yet"
        return
    (x,), (weight,), groups = a["x"], a["weight"], a["group_list"]
    if x.dtype != weight.dtype:
        yield f"x {x} and weight {weight}: want one dtype"
    if weight.dim != 3 or weight.shape[1] != x.shape[1]:
        yield f"x {x} and weight {weight} do not fit: want [M, K] and [E, K, N]"
    if not isinstance(groups, Tensor) or groups.dtype != "int64" or groups.shape != weight.shape[:1]:
        yield f"group_list is {groups}: want int64{list(weight.shape[:1])}, one entry per group"
    elif groups.content is not None:
        yield from group_list("group_list", groups.content, a["group_list_type"], x.shape[0])
    if a["split_item"] not in (2, 3):
        yield f"split_item is {a['split_item']}: 2 or 3 for one tensor out"


# ---- normalisation ----


def rms_norm(call: Call) -> Iterator[str]:
    """npu_rms_norm(input, gamma, epsilon=) -> y, rstd"""
    x, gamma, epsilon = (call.arguments[name] for name in ("input", "gamma", "epsilon"))
    yield from _by_name(call, "epsilon")
    if not isinstance(gamma, Tensor):
        yield f"gamma is {gamma}"
        return
    yield from _norm_inputs(x, gamma)
    if not 0.0 < epsilon < 1.0:
        yield f"epsilon is {epsilon}"
    if call.results is not None:
        yield from _is("result 0 (y)", call.results[0], x.dtype, x.shape)
        yield from _is("result 1 (rstd)", call.results[1], "float32", _rstd(x, gamma))


def rms_norm_backward(call: Call) -> Iterator[str]:
    """npu_rms_norm_backward(dy, input, gamma, rstd) -> dx, dgamma; dgamma is fp32 and autograd casts it"""
    a = call.arguments
    x, gamma = a["input"], a["gamma"]
    yield from _norm_inputs(x, gamma)
    yield from _is("dy", a["dy"], x.dtype, x.shape)
    yield from _is("rstd", a["rstd"], "float32", _rstd(x, gamma))
    if call.results is not None:
        yield from _is("result 0 (dx)", call.results[0], x.dtype, x.shape)
        yield from _is("result 1 (dgamma)", call.results[1], "float32", gamma.shape)


def _norm_inputs(x: Tensor, gamma: Tensor) -> Iterator[str]:
    if x.dtype not in DTYPES:
        yield f"input is {x.dtype}: want one of {', '.join(DTYPES)}"
    if gamma.dtype != x.dtype:
        yield f"gamma is {gamma.dtype} and input {x.dtype}: want one dtype"
    if not 2 <= x.dim <= 8:
        yield f"input has {x.dim} dimensions: want 2 to 8"
    if gamma.dim == 0 or gamma.shape != x.shape[-gamma.dim :]:
        yield f"gamma is {gamma}: want the last dimensions of input {x}"


def _rstd(x: Tensor, gamma: Tensor) -> tuple[int, ...]:
    return (*x.shape[: -gamma.dim or None], *(1 for _ in gamma.shape))


# ---- shared ----


def _by_name(call: Call, *names: str) -> Iterator[str]:
    """Arguments with a default, or that could be taken for another, are to be passed by name."""
    missing = [] if call.named is None else [name for name in names if name not in call.named]
    if missing:
        yield f"{', '.join(missing)} not passed by name"


def _is(what: str, found: object, dtype: str, shape: tuple[int, ...]) -> Iterator[str]:
    if not isinstance(found, Tensor) or found.dtype != dtype or found.shape != tuple(shape):
        yield f"{what} is {found}: want {dtype}{list(shape)}"


CONTRACTS: Mapping[str, Callable[[Call], Iterator[str]]] = {
    "npu_fusion_attention": fusion_attention,
    "npu_fusion_attention_grad": fusion_attention_grad,
    "npu_grouped_matmul": grouped_matmul,
    "npu_rms_norm": rms_norm,
    "npu_rms_norm_backward": rms_norm_backward,
}
