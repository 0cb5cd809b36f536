"""Runs compiled kernels on the CPU, by their PTX: for kernels that Triton's interpreter cannot run (Gluon, bf16).

All threads of a program go through the instructions together, each register an array over them; of threads that parted
those furthest behind go first, which is what brings them together again. Only the instructions are there that our
kernels compile to; another is an error that names it. Loads and stores outside of the tensors given, or of shared
memory never written, are errors too. Programs run one after the other: what one must not see of another is not checked,
nor is anything about time. What is asynchronous, copies to shared memory and the warp group's products, is done as late
as may be: at the wait that asks for it. So a wait that is missing, or memory or a register that is used again too
early, gives other numbers. Results are those of a GPU but for approximations (ex2, rsqrt, div.full, exact here) and the
order of additions inside mma and wgmma, which is exact here and rounded once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import product
from typing import Any

import numpy as np
import torch
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tests.support.compiled import _NoDevice

DTYPES = {"b8": "u1", "u8": "u1", "b16": "u2", "u16": "u2", "s16": "i2", "b32": "u4", "u32": "u4", "s32": "i4"}
DTYPES |= {"s8": "i1", "b64": "u8", "u64": "u8", "s64": "i8", "f32": "f4", "f64": "f8", "bf16": "u2"}
BASE, GAP = 1 << 16, 256
TOGETHER = {"bar", "shfl", "mma", "wgmma", "ldmatrix", "stmatrix", "redux", "vote"}


class Memory:
    """Device memory: tensors in it, with gaps between."""

    def __init__(self) -> None:
        self.bytes = np.zeros(BASE, np.uint8)
        self.valid = np.zeros(BASE, bool)
        self.places: dict[int, tuple[torch.Tensor, int]] = {}

    def place(self, tensor: torch.Tensor) -> int:
        """The address of a tensor's first element; all of its storage is there."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.places:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            start = len(self.bytes)
            room = np.zeros(-(-len(whole) // GAP) * GAP + GAP, np.uint8)
            room[: len(whole)] = whole.numpy()
            self.bytes = np.concatenate((self.bytes, room))
            self.valid = np.concatenate((self.valid, np.arange(len(room)) < len(whole)))
            self.places[storage.data_ptr()] = (whole, start)
        return self.places[storage.data_ptr()][1] + tensor.storage_offset() * tensor.element_size()

    def copy_back(self) -> None:
        for whole, start in self.places.values():
            whole.numpy()[:] = self.bytes[start : start + len(whole)]


@contextmanager
def running(arch: int = 90) -> Iterator[list[str]]:
    """Within it launches run here, at once; the list takes the kernels' names. Tensors must be on the CPU."""
    names: list[str] = []
    compile_and_launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = compile_and_launch(self, *args, grid=grid, warmup=True, **kwargs)
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        given = {parameter.name: parameter.default for parameter in self.params} | given
        values = [value for name, kind in kernel.src.signature.items() for value in _passed(given[name], kind)]
        launch(kernel.asm["ptx"], kernel.metadata.shared, kernel.metadata.num_warps, grid, values)
        names.append(kernel.metadata.name)
        return kernel

    before = driver._active
    driver.set_active(_NoDevice(arch))
    JITFunction.run = run
    try:
        yield names
    finally:
        JITFunction.run = compile_and_launch
        driver._active = before


def _passed(value: Any, kind: Any) -> list[Any]:
    """What of an argument is passed: constants are not, tuples are by their elements."""
    if isinstance(kind, tuple):
        return [part for pair in zip(value, kind, strict=True) for part in _passed(*pair)]
    return [] if kind == "constexpr" else [value]


def launch(ptx: str, shared_bytes: int, num_warps: int, grid: tuple[int, ...], values: list[Any]) -> None:
    memory = Memory()
    parameters = [memory.place(value) if isinstance(value, torch.Tensor) else value for value in values]
    code = _parsed(ptx)
    for z, y, x in product(*(range(size) for size in reversed((*grid, 1, 1)[:3]))):
        Program(code, memory, parameters, shared_bytes, num_warps, (x, y, z), (*grid, 1, 1)[:3]).run()
    memory.copy_back()


@lru_cache(maxsize=64)
def _parsed(ptx: str) -> Code:
    return Code(ptx)


class Code:
    """Instructions as (predicate, wanted value, op, operands), and where labels point."""

    def __init__(self, ptx: str):
        body = ptx[ptx.index(".entry") :]
        body = body[body.index("\n{") + 2 :].split("\n\t.file")[0]
        body = body[: body.rindex("\n}")]
        lines = [line.split("//")[0] for line in body.split("\n")]
        text = "\n".join(line for line in lines if not re.match(r"\s*\.(loc|pragma)\b", line))
        self.labels: dict[str, int] = {}
        self.instructions: list[tuple[str | None, bool, list[str], list[str]]] = []
        # variables in shared memory, one behind the other behind what the launch asks for
        self.static_bytes = 0
        variable, place = "", 0
        for statement in text.split(";"):
            rest = statement.strip()
            while found := re.match(r"(?:[{}]|(\$\w+):)\s*", rest):
                if found[1]:
                    self.labels[found[1]] = len(self.instructions)
                rest = rest[found.end() :]
            if not rest or rest.startswith(".reg"):
                continue
            if declared := re.match(r"\.shared \.align 16 \.b8 (\w+)\[(\d+)\]", rest):
                variable, place = declared[1], self.static_bytes
                self.static_bytes += -(-int(declared[2]) // 16) * 16
                continue
            predicate = re.match(r"@(!?)(%p\d+)\s+", rest)
            if predicate:
                rest = rest[predicate.end() :]
            op, _, operands = rest.partition(" ") if " " in rest else rest.partition("\t")
            op, _, more = op.partition("\t")
            name, wanted = (predicate[2], not predicate[1]) if predicate else (None, True)
            parts = [f"static_{place}" if part == variable else part for part in _split(f"{more} {operands}")]
            self.instructions.append((name, wanted, op.split("."), parts))


def _split(operands: str) -> list[str]:
    """At commas outside of brackets and braces."""
    return [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", operands) if part.strip()]


class Program:
    def __init__(
        self,
        code: Code,
        memory: Memory,
        parameters: list[int],
        shared_bytes: int,
        num_warps: int,
        place: tuple[int, ...],
        grid: tuple[int, ...],
    ):
        self.code, self.memory, self.parameters = code, memory, parameters
        self.size = num_warps * 32
        self.static = -(-shared_bytes // 16) * 16
        room = self.static + code.static_bytes
        self.shared, self.written = np.zeros(room, np.uint8), np.zeros(room, bool)
        self.lane = np.arange(self.size) % 32
        self.registers: dict[str, np.ndarray] = {"%tid.x": np.arange(self.size, dtype=np.uint32)}
        for axis, at, of in zip("xyz", place, grid, strict=True):
            self.registers[f"%ctaid.{axis}"] = np.full(self.size, at, np.uint32)
            self.registers[f"%nctaid.{axis}"] = np.full(self.size, of, np.uint32)
        self.at = np.zeros(self.size, np.int64)
        self.active = np.ones(self.size, bool)
        # what is on its way, by commits: the last of each has not been committed yet
        self.copies: list[list[Callable[[], None]]] = [[]]
        self.products: list[list[Callable[[], None]]] = [[]]

    def run(self) -> None:
        end = len(self.code.instructions)
        waiting = np.zeros(self.size, bool)
        with np.errstate(all="ignore"):
            while (self.at < end).any():
                assert not waiting[self.at < end].all(), "threads wait for others that never come"
                now = int(self.at[~waiting].min())
                predicate, wanted, op, operands = self.code.instructions[now]
                here = self.at == now
                if op[0] in TOGETHER and not here.all():
                    # all of a program, a warp group or a warp must be here; the others may have gone another way round
                    together = self.size if op[:2] == ["bar", "sync"] else 128 if op[0] == "wgmma" else 32
                    missing = (~here & (self.at < end)).reshape(-1, together).any(1)
                    waiting |= here & missing.repeat(self.size // len(missing))
                    here &= ~waiting
                    if not here.any():
                        continue
                self.at[here] = now + 1
                waiting[:] = False
                self.active = here if predicate is None else here & (self.registers[predicate] == wanted)
                if op[0] == "bra":
                    self.at[self.active] = self.code.labels[operands[0]]
                elif op[0] in ("ret", "exit"):
                    self.at[self.active] = end
                elif self.active.any():
                    try:
                        getattr(self, f"op_{op[0]}")(op, operands)
                    except AttributeError as error:
                        raise NotImplementedError(f"{'.'.join(op)} {', '.join(operands)}") from error

    # registers

    def get(self, operand: str, kind: str) -> np.ndarray:
        """An operand's value, as its type."""
        dtype = np.dtype(bool) if kind == "pred" else np.dtype(DTYPES[kind])
        if operand in self.registers:
            value = self.registers[operand]
            if value.dtype.itemsize != dtype.itemsize:
                value = value.astype(f"u{dtype.itemsize}")
            return value.view(dtype)
        if operand == "global_smem":
            return np.zeros(self.size, dtype)
        if operand.startswith("static_"):
            return np.full(self.size, self.static + int(operand.removeprefix("static_")), dtype)
        if operand.startswith("0f"):
            return np.full(self.size, int(operand[2:], 16), np.uint32).view(np.float32)
        if operand.startswith("0d"):
            return np.full(self.size, int(operand[2:], 16), np.uint64).view(dtype)
        if dtype.itemsize > 1 or kind != "pred":
            bits = int(operand.rstrip("U"), 0) % (1 << 8 * dtype.itemsize)
            return np.full(self.size, bits, f"u{dtype.itemsize}").view(dtype)
        return np.full(self.size, bool(int(operand)))

    def put(self, operand: str, value: np.ndarray, wide: bool = False) -> None:
        """To where threads are active; integers are kept without sign, `wide` as 64 bits."""
        if value.dtype != bool:
            value = value.astype(np.int64).view(np.uint64) if wide else value.view(f"u{value.dtype.itemsize}")
        if operand == "_":
            return
        if operand in self.registers and self.registers[operand].dtype == value.dtype:
            value = np.where(self.active, value, self.registers[operand])
        self.registers[operand] = value

    def binary(self, op: list[str], operands: list[str], function: Callable[..., np.ndarray]) -> None:
        self.put(operands[0], function(*(self.get(operand, op[-1]) for operand in operands[1:])))

    # moves and conversions

    def op_mov(self, op: list[str], operands: list[str]) -> None:
        target, source = operands
        whole = np.dtype(DTYPES.get(op[1], "u1"))
        if source.startswith("{"):
            names = _split(source[1:-1])
            bits = 8 * whole.itemsize // len(names)
            parts = [self.get(name, f"b{bits}").astype(whole) << whole.type(bits * i) for i, name in enumerate(names)]
            self.put(target, np.bitwise_or.reduce(parts))
        elif target.startswith("{"):
            names, value = _split(target[1:-1]), self.get(source, op[1])
            bits = 8 * whole.itemsize // len(names)
            for place, name in enumerate(names):
                part = (value >> whole.type(bits * place)).astype(f"u{bits // 8}")
                self.put(name, part.astype("u2") if bits == 8 else part)
        else:
            self.put(target, self.get(source, op[1]).copy())

    def op_cvt(self, op: list[str], operands: list[str]) -> None:
        to, source = op[-2], op[-1]
        if source == "e4m3x2":
            pair = torch.from_numpy(self.get(operands[1], "u16").view(np.uint8)).view(torch.float8_e4m3fn)
            return self.put(operands[0], pair.half().view(torch.int16).numpy().view(np.uint32))
        if to in NARROW:
            # the first operand is the high half; one that nobody reads may never have been written
            words = [operand if operand in self.registers or operand[0] != "%" else "0" for operand in operands[1:]]
            parts = [NARROW[to](self.get(word, "f32")) for word in reversed(words)]
            return self.put(operands[0], np.stack(parts, -1).view(f"u{len(parts) * parts[0].itemsize}")[:, 0])
        value = self.get(operands[1], source)
        if (to, source) == ("f32", "bf16"):
            return self.put(operands[0], (value.astype(np.uint32) << 16).view(np.float32))
        return self.put(operands[0], value.astype(DTYPES[to]))

    def op_selp(self, op: list[str], operands: list[str]) -> None:
        first, second = (self.get(operand, op[1]) for operand in operands[1:3])
        self.put(operands[0], np.where(self.get(operands[3], "pred"), first, second))

    def op_setp(self, op: list[str], operands: list[str]) -> None:
        compare: dict[str, Callable[..., np.ndarray]] = {
            "lt": np.less,
            "le": np.less_equal,
            "gt": np.greater,
            "ge": np.greater_equal,
            "eq": np.equal,
            "ne": lambda a, b: (a != b) & (a == a) & (b == b),
            "num": lambda a, b: (a == a) & (b == b),
            "nan": lambda a, b: (a != a) | (b != b),
            "ltu": lambda a, b: ~(a >= b),
            "leu": lambda a, b: ~(a > b),
            "gtu": lambda a, b: ~(a <= b),
            "geu": lambda a, b: ~(a < b),
            "equ": lambda a, b: (a == b) | (a != a) | (b != b),
            "neu": np.not_equal,
        }
        if op[-1] == "bf16":
            values = ((self.get(operand, "bf16").astype(np.uint32) << 16).view(np.float32) for operand in operands[1:])
            return self.put(operands[0], compare[op[1]](*values))
        if op[-1] == "bf16x2":
            pairs = [_halves(self.get(operand, "b32")) for operand in operands[1:]]
            for half, name in enumerate(operands[0].split("|")):
                self.put(name, compare[op[1]](*(pair[..., half] for pair in pairs)))
            return None
        self.binary(op, operands, compare[op[1]])

    # integers and bits

    def op_and(self, op: list[str], operands: list[str]) -> None:
        self.binary(op, operands, np.bitwise_and)

    def op_or(self, op: list[str], operands: list[str]) -> None:
        self.binary(op, operands, np.bitwise_or)

    def op_xor(self, op: list[str], operands: list[str]) -> None:
        self.binary(op, operands, np.bitwise_xor)

    def op_not(self, op: list[str], operands: list[str]) -> None:
        self.binary(op, operands, np.logical_not if op[1] == "pred" else np.invert)

    def op_shl(self, op: list[str], operands: list[str]) -> None:
        value, count = self.get(operands[1], op[1]), self.get(operands[2], "u32")
        self.put(operands[0], np.where(count < value.dtype.itemsize * 8, value << count.astype(value.dtype), 0))

    def op_shr(self, op: list[str], operands: list[str]) -> None:
        value, count = self.get(operands[1], op[1]), self.get(operands[2], "u32")
        most = value.dtype.itemsize * 8 - 1
        shifted = value >> np.minimum(count, most).astype(value.dtype)
        self.put(operands[0], shifted if op[1][0] == "s" else np.where(count <= most, shifted, 0).astype(value.dtype))

    def op_bfe(self, op: list[str], operands: list[str]) -> None:
        value = self.get(operands[1], op[1])
        start, width = (self.get(operand, "u32").astype(value.dtype) for operand in operands[2:])
        one, bits = value.dtype.type(1), value.dtype.type(8 * value.dtype.itemsize)
        if op[1][0] == "u":
            return self.put(operands[0], value >> start & (one << width) - one)
        # the field's highest bit is its sign
        self.put(operands[0], value << (bits - width - start) >> (bits - width))

    def op_popc(self, op: list[str], operands: list[str]) -> None:
        value = self.get(operands[1], op[1])
        bits = np.unpackbits(value.view(np.uint8).reshape(self.size, -1), axis=1)
        self.put(operands[0], bits.sum(1).astype(np.uint32))

    def op_shf(self, op: list[str], operands: list[str]) -> None:
        low, high, count = (self.get(operand, "u32").astype(np.uint64) for operand in operands[1:])
        both = high << np.uint64(32) | low
        count = count % np.uint64(32)
        moved = both >> count if op[1] == "r" else both << count >> np.uint64(32)
        self.put(operands[0], moved.astype(np.uint32))

    def op_lop3(self, op: list[str], operands: list[str]) -> None:
        a, b, c = (self.get(operand, "b32") for operand in operands[1:4])
        out = np.zeros_like(a)
        for index in range(8):
            if int(operands[4], 0) >> index & 1:
                out |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
        self.put(operands[0], out)

    def op_prmt(self, op: list[str], operands: list[str]) -> None:
        a, b, selector = (self.get(operand, "b32") for operand in operands[1:])
        source = np.stack([value >> 8 * i & 0xFF for value in (a, b) for i in range(4)])
        out = np.zeros_like(a)
        for i in range(4):
            pick = selector >> 4 * i & 0xF
            byte = source[pick & 7, np.arange(self.size)]
            byte = np.where(pick & 8, np.where(byte & 0x80, 0xFF, 0), byte).astype(np.uint32)
            out |= byte << 8 * i
        self.put(operands[0], out)

    def op_mad(self, op: list[str], operands: list[str]) -> None:
        self._multiply(op, operands, operands[3])

    def op_mul(self, op: list[str], operands: list[str]) -> None:
        if op[-1] in ("f32", "f64"):
            return self.binary(op, operands, np.multiply)
        return self._multiply(op, operands, None)

    def _multiply(self, op: list[str], operands: list[str], added: str | None) -> None:
        first, second = (self.get(operand, op[-1]) for operand in operands[1:3])
        if op[1] == "wide":
            kind = "s64" if op[-1][0] == "s" else "u64"
            value = first.astype(DTYPES[kind]) * second.astype(DTYPES[kind])
            return self.put(operands[0], value if added is None else value + self.get(added, kind))
        if op[1] == "hi":
            kind = "s64" if op[-1][0] == "s" else "u64"
            both = first.astype(DTYPES[kind]) * second.astype(DTYPES[kind])
            return self.put(operands[0], (both >> 32).astype(DTYPES[op[-1]]))
        value = first * second
        return self.put(operands[0], value if added is None else value + self.get(added, op[-1]))

    # numbers

    def op_add(self, op: list[str], operands: list[str]) -> None:
        self.binary(op, operands, lambda a, b: _one_nan(a + b))

    def op_sub(self, op: list[str], operands: list[str]) -> None:
        self.binary(op, operands, np.subtract)

    def op_min(self, op: list[str], operands: list[str]) -> None:
        least = np.fmin if op[-1][0] == "f" and "NaN" not in op else np.minimum
        if "xorsign" in op:
            # the sign is the product of both, of a zero too
            one = np.float32(1)
            return self.binary(
                op, operands, lambda a, b: least(abs(a), abs(b)) * np.copysign(one, a) * np.copysign(one, b)
            )
        return self.binary(op, operands, least)

    def op_max(self, op: list[str], operands: list[str]) -> None:
        self.binary(op, operands, np.fmax if op[-1][0] == "f" else np.maximum)

    def op_neg(self, op: list[str], operands: list[str]) -> None:
        self.binary(op, operands, np.negative)

    def op_div(self, op: list[str], operands: list[str]) -> None:
        self.binary(op, operands, np.divide if op[-1][0] == "f" else _quotient)

    def op_rem(self, op: list[str], operands: list[str]) -> None:
        self.binary(op, operands, lambda a, b: (a - _quotient(a, b) * b).astype(a.dtype))

    def op_abs(self, op: list[str], operands: list[str]) -> None:
        if op[-1] == "bf16x2":
            return self.put(operands[0], self.get(operands[1], "b32") & np.uint32(0x7FFF7FFF))
        self.binary(op, operands, (lambda bits: bits & np.uint16(0x7FFF)) if op[-1] == "bf16" else np.abs)
        return None

    def op_ex2(self, op: list[str], operands: list[str]) -> None:
        self.binary(op, operands, np.exp2)

    def op_rcp(self, op: list[str], operands: list[str]) -> None:
        self.binary(op, operands, np.reciprocal)

    def op_rsqrt(self, op: list[str], operands: list[str]) -> None:
        self.binary(op, operands, lambda value: (1 / np.sqrt(value.astype(np.float64))).astype(np.float32))

    def op_fma(self, op: list[str], operands: list[str]) -> None:
        if op[-1] == "f64":
            return self.binary(op, operands, lambda a, b, c: (a.astype("g") * b + c).astype("f8"))
        if op[-1] == "f32":
            a, b, c = (self.get(operand, "f32").astype(np.float64) for operand in operands[1:])
            return self.put(operands[0], (a * b + c).astype(np.float32))
        a, b, c = (_halves(self.get(operand, "b32")) for operand in operands[1:])
        low, high = (_to_bf16((a * b + c)[..., half].astype(np.float32)).astype(np.uint32) for half in range(2))
        return self.put(operands[0], high << 16 | low)

    def op_mma(self, op: list[str], operands: list[str]) -> None:
        assert op[3:7] == ["m16n8k16", "row", "col", "f32"] and op[7:] in (
            ["bf16"] * 2 + ["f32"],
            ["f16"] * 2 + ["f32"],
        ), op
        names, kind = [_split(operand[1:-1]) for operand in operands], op[7]
        a, b = ([_halves(self.get(name, "b32"), kind).reshape(-1, 32, 2) for name in names[part]] for part in (1, 2))
        c = np.stack([self.get(name, "f32") for name in names[3]], -1).reshape(-1, 32, 4).astype(np.float64)
        lane = np.arange(32)
        g, q = lane // 4, lane % 4
        left, right = np.zeros((len(c), 16, 16)), np.zeros((len(c), 16, 8))
        for i in range(2):
            for part, value in enumerate(a):
                left[:, g + 8 * (part % 2), 2 * q + 8 * (part // 2) + i] = value[..., i]
            for part, value in enumerate(b):
                right[:, 2 * q + 8 * part + i, g] = value[..., i]
        sums = left @ right
        for part, name in enumerate(names[0]):
            value = c[..., part] + sums[:, g + 8 * (part // 2), 2 * q + part % 2]
            self.put(name, value.astype(np.float32).reshape(-1))

    def op_wgmma(self, op: list[str], operands: list[str]) -> None:
        """A warp group's product with A in registers and B, rows of 128 bytes, in shared memory."""
        if op[1] != "mma_async":
            return None if op[1] == "fence" else self._in_groups(self.products, op[1], operands)
        shape = re.fullmatch(r"m64n(\d+)k16", op[4])
        assert shape and op[5:] == ["f32", "bf16", "bf16"] and operands[1][0] == "{", op
        added = self.get(operands[3], "pred")
        assert operands[4:] == ["1", "1", "0"] and (added == added[0]).all(), operands
        sums, weights = (_split(operand[1:-1]) for operand in operands[:2])
        descriptor = self.get(operands[2], "u64")
        self.products[-1].append(partial(self._multiply_group, sums, weights, descriptor, int(shape[1]), added[0]))
        return None

    def _multiply_group(
        self, sums: list[str], weights: list[str], descriptor: np.ndarray, columns: int, added: bool
    ) -> None:
        descriptors = descriptor.reshape(-1, 128)
        assert (descriptors == descriptors[:, :1]).all(), "the threads of a warp group disagree about B"
        right = np.stack([self._shared_matrix(int(each), columns) for each in descriptors[:, 0]])
        lane = np.arange(32)
        g, q = lane // 4, lane % 4
        left = np.zeros((len(right), 4, 16, 16))
        for part, name in enumerate(weights):
            value = _halves(self.get(name, "b32")).reshape(-1, 4, 32, 2)
            for i in range(2):
                left[:, :, g + 8 * (part % 2), 2 * q + 8 * (part // 2) + i] = value[..., i]
        out = left @ right[:, None]
        for part, name in enumerate(sums):
            value = out[:, :, g + 8 * (part // 2 % 2), part // 4 * 8 + 2 * q + part % 2].reshape(-1)
            before = self.get(name, "f32").astype(np.float64) if added else 0.0
            self.put(name, (before + value).astype(np.float32))

    def _shared_matrix(self, descriptor: int, columns: int) -> np.ndarray:
        """fp64 [16, columns] of bf16 in shared memory, a column's numbers next to each other; what is of a column is of
        no other, so that what no thread has written is NaN."""
        assert descriptor >> 62 == 1 and descriptor >> 49 & 7 == 0, "B: want rows of 128 bytes, swizzled"
        start, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 32))
        column, k = np.arange(columns), np.arange(16)[:, None]
        address = start + column // 8 * stride + column % 8 * 128 + 2 * k
        address ^= (address >> 7 & 7) << 4
        where = address[..., None] + np.arange(2)
        assert (where < len(self.shared)).all(), "shared: read outside"
        words = np.ascontiguousarray(self.shared[where]).view(np.uint16)[..., 0].astype(np.uint32) << 16
        return np.where(self.written[where].all(-1), words.view(np.float32), np.nan).astype(np.float64)

    # between lanes

    def op_shfl(self, op: list[str], operands: list[str]) -> None:
        value, lane = self.get(operands[1], "b32"), self.lane
        by = self.get(operands[2], "s32").astype(np.int64)
        assert int(operands[3], 0) == (0 if op[2] == "up" else 31), operands
        source = {"bfly": lane ^ by, "up": lane - by, "down": lane + by, "idx": by}[op[2]]
        source = np.where((source < 0) | (source > 31), lane, source)
        self.put(operands[0].split("|")[0], value[np.arange(self.size) - lane + source])

    def op_redux(self, op: list[str], operands: list[str]) -> None:
        value = self.get(operands[1], op[-1]).reshape(-1, 32)
        reduced = {"max": value.max(1), "min": value.min(1), "add": value.sum(1)}[op[2]].astype(value.dtype)
        self.put(operands[0], reduced.repeat(32))

    def op_vote(self, op: list[str], operands: list[str]) -> None:
        assert op[1:3] == ["sync", "ballot"], op
        bits = self.get(operands[1], "pred").reshape(-1, 32).astype(np.uint32) << np.arange(32, dtype=np.uint32)
        self.put(operands[0], bits.sum(1).astype(np.uint32).repeat(32))

    # memory

    def _address(self, operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[] ").partition("+")
        kind = "b64" if base.strip().startswith("%rd") else "b32"
        return self.get(base.strip(), kind).astype(np.int64) + int(offset or 0)

    def _read(self, space: str, address: np.ndarray, kind: str) -> np.ndarray:
        dtype = np.dtype(DTYPES[kind])
        memory, there = (self.memory.bytes, self.memory.valid) if space == "global" else (self.shared, self.written)
        where = address[self.active][:, None] + np.arange(dtype.itemsize)
        assert (where >= 0).all() and (where < len(memory)).all() and there[where].all(), f"{space}: read outside"
        out = np.zeros(self.size, dtype)
        out[self.active] = np.ascontiguousarray(memory[where]).view(dtype)[:, 0]
        return out

    def _write(self, space: str, address: np.ndarray, value: np.ndarray) -> None:
        value = np.ascontiguousarray(value[self.active])
        where = address[self.active][:, None] + np.arange(value.dtype.itemsize)
        memory = self.memory.bytes if space == "global" else self.shared
        assert (where >= 0).all() and (where < len(memory)).all(), f"{space}: written outside"
        if space == "global":
            assert self.memory.valid[where].all(), "global: written outside"
        else:
            self.written[where] = True
        memory[where] = value[:, None].view(np.uint8)

    def op_ld(self, op: list[str], operands: list[str]) -> None:
        if op[1] == "param":
            found = re.search(r"_param_(\d+)", operands[1])
            assert found is not None
            given = self.parameters[int(found[1])]
            bits = int(np.float32(given).view(np.uint32)) if isinstance(given, float) else given
            value = np.full(self.size, bits, np.int64)
            narrow = value.astype(DTYPES[op[2]])
            return self.put(operands[0], narrow, wide=operands[0].startswith("%rd"))
        address, step = self._address(operands[1]), np.dtype(DTYPES[op[-1]]).itemsize
        space = "shared" if "shared" in op else "global"
        for place, name in enumerate(_split(operands[0].strip("{} "))):
            value = self._read(space, address + place * step, op[-1])
            self.put(name, value.astype("u2") if value.itemsize == 1 else value)
        return None

    def op_st(self, op: list[str], operands: list[str]) -> None:
        address, step = self._address(operands[0]), np.dtype(DTYPES[op[-1]]).itemsize
        space = "shared" if "shared" in op else "global"
        for place, name in enumerate(_split(operands[1].strip("{} "))):
            self._write(space, address + place * step, self.get(name, op[-1]))

    def op_cp(self, op: list[str], operands: list[str]) -> None:
        """Asynchronous copies to shared memory: done when they are waited for."""
        if op[2] in ("commit_group", "wait_group"):
            return self._in_groups(self.copies, op[2], operands)
        assert op[-2:] == ["shared", "global"], op
        target, source = (self._address(operand) for operand in operands[:2])
        size = int(operands[2], 0)
        copied = self.get(operands[3], "u32") if len(operands) > 3 else np.full(self.size, size)
        self.copies[-1].append(partial(self._copy, target, source, size, copied, self.active))

    def _copy(self, target: np.ndarray, source: np.ndarray, size: int, copied: np.ndarray, active: np.ndarray) -> None:
        """The first `copied` bytes of size, then zeros."""
        there = np.arange(size) < copied[active][:, None]
        where = (source[active][:, None] + np.arange(size))[there]
        assert (where >= 0).all() and (where < len(self.memory.bytes)).all() and self.memory.valid[where].all(), (
            "global: read outside"
        )
        bytes_of = np.zeros(there.shape, np.uint8)
        bytes_of[there] = self.memory.bytes[where]
        where = target[active][:, None] + np.arange(size)
        assert (where >= 0).all() and (where < len(self.shared)).all(), "shared: written outside"
        self.shared[where], self.written[where] = bytes_of, True

    def _in_groups(self, groups: list[list[Callable[[], None]]], step: str, operands: list[str]) -> None:
        """Closes a group, or does all but the last ones closed. For all threads of a program alike."""
        assert self.active.all(), "a group of asynchronous steps of some threads only"
        if step == "commit_group":
            groups.append([])
            return
        while len(groups) - 1 > int(operands[0], 0):
            for one in groups.pop(0):
                one()

    def op_atom(self, op: list[str], operands: list[str]) -> None:
        """One thread after the other."""
        kind, address, added = op[-1], self._address(operands[1]), self.get(operands[2], op[-1])
        before, active = np.zeros_like(added), self.active
        combine = {
            "add": np.add,
            "max": np.maximum,
            "min": np.minimum,
            "or": np.bitwise_or,
            "exch": lambda old, new: new,
        }
        for thread in np.nonzero(active)[0]:
            self.active = np.arange(self.size) == thread
            before[thread] = self._read(op[1], address, kind)[thread]
            self._write(op[1], address, combine[op[-2]](before, added).astype(added.dtype))
        self.active = active
        self.put(operands[0], before)

    def _rows(self, address: np.ndarray, matrix: int) -> np.ndarray:
        """Where each lane's word of an 8x8 matrix of 16 bits is: lanes 8 m .. hold the addresses of its rows."""
        return address.reshape(-1, 32)[:, 8 * matrix + np.arange(32) // 4].reshape(-1) + 4 * (self.lane % 4)

    def op_ldmatrix(self, op: list[str], operands: list[str]) -> None:
        address = self._address(operands[1])
        for matrix, name in enumerate(_split(operands[0].strip("{} "))):
            if "trans" not in op:
                self.put(name, self._read("shared", self._rows(address, matrix), "b32"))
                continue
            low, high = (self._read("shared", part, "u16").astype(np.uint32) for part in self._columns(address, matrix))
            self.put(name, high << 16 | low)

    def op_stmatrix(self, op: list[str], operands: list[str]) -> None:
        address = self._address(operands[0])
        for matrix, name in enumerate(_split(operands[1].strip("{} "))):
            if "trans" not in op:
                self._write("shared", self._rows(address, matrix), self.get(name, "b32"))
                continue
            value = self.get(name, "b32")
            for half, part in enumerate(self._columns(address, matrix)):
                self._write("shared", part, (value >> 16 * half & 0xFFFF).astype(np.uint16))

    def _columns(self, address: np.ndarray, matrix: int) -> list[np.ndarray]:
        """The same for the transposed matrix: a lane's two numbers stand in one column, below each other."""
        rows = address.reshape(-1, 32)[:, 8 * matrix : 8 * matrix + 8]
        return [(rows[:, 2 * (np.arange(32) % 4) + i] + 2 * (np.arange(32) // 4)).reshape(-1) for i in range(2)]

    # what changes no value here

    def _nothing(self, op: list[str], operands: list[str]) -> None:
        pass

    op_bar = op_createpolicy = op_fence = op_griddepcontrol = op_pmevent = _nothing


def _one_nan(values: np.ndarray) -> np.ndarray:
    """Of fp32 results each NaN is the one that a GPU's arithmetic gives."""
    if values.dtype != np.float32:
        return values
    return np.where(np.isnan(values), np.uint32(0x7FFFFFFF).view(np.float32), values)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of integers, towards 0; of a division by 0, by threads that do not use it, 0."""
    whole = np.abs(a.astype(object)) // np.where(b == 0, 1, np.abs(b.astype(object)))
    return np.where((a < 0) != (b < 0), -whole, whole).astype(a.dtype)


def _halves(words: np.ndarray, kind: str = "bf16") -> np.ndarray:
    """fp64 [..., 2] of bf16 or f16 pairs, the low half first."""
    pairs = np.stack((words & 0xFFFF, words >> 16), -1)
    if kind == "f16":
        return pairs.astype(np.uint16).view(np.float16).astype(np.float64)
    return (pairs.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _to_bf16(values: np.ndarray) -> np.ndarray:
    """uint16 bits, rounded to nearest, ties to even."""
    return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.int16).numpy().view(np.uint16)


def _to_f16(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).view(np.uint16)


def _to_e4m3(values: np.ndarray) -> np.ndarray:
    """Bytes, saturated as cvt.satfinite does: NaN alone stays none."""
    return torch.from_numpy(np.clip(values, -448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


NARROW = {"bf16": _to_bf16, "bf16x2": _to_bf16, "f16": _to_f16, "f16x2": _to_f16, "e4m3x2": _to_e4m3}
"""What narrows fp32, alone or in pairs."""
