"""Trees of shapes by name, {path: shape}, of real models and of extremes. Nothing is allocated here."""

import math

Shapes = dict[str, tuple[int, ...]]


def single() -> Shapes:
    """One large leaf: the speed of the kernel alone."""
    return {"kernel": (65536, 4096)}


def llama1b() -> Shapes:
    """Llama-3.2-1B, as its checkpoint names it; the head is tied to the embedding."""
    vocabulary, width, hidden, layers, kv = 128256, 2048, 8192, 16, 512
    tree: Shapes = {"embed_tokens": (vocabulary, width)}
    for layer in (f"layers/{index}" for index in range(layers)):
        tree |= {f"{layer}/self_attn/{name}_proj": (width, width) for name in "qo"}
        tree |= {f"{layer}/self_attn/{name}_proj": (kv, width) for name in "kv"}
        tree |= {f"{layer}/mlp/{name}_proj": (hidden, width) for name in ("gate", "up")}
        tree[f"{layer}/mlp/down_proj"] = (width, hidden)
        tree |= {f"{layer}/{name}_layernorm": (width,) for name in ("input", "post_attention")}
    return tree | {"norm": (width,)}


def gpt2() -> Shapes:
    """GPT-2, 124 M, as Flax and the Hugging Face checkpoint name it: its vocabulary of 50257 divides by nothing."""
    width = 768
    tree: Shapes = {"wte": (50257, width), "wpe": (1024, width)}
    for layer in (f"h/{index}" for index in range(12)):
        tree |= _norm(f"{layer}/ln_1", width)
        tree |= _dense(f"{layer}/attn/c_attn", width, 3 * width)
        tree |= _dense(f"{layer}/attn/c_proj", width, width)
        tree |= _norm(f"{layer}/ln_2", width)
        tree |= _dense(f"{layer}/mlp/c_fc", width, 4 * width)
        tree |= _dense(f"{layer}/mlp/c_proj", 4 * width, width)
    return tree | _norm("ln_f", width)


def vit_b() -> Shapes:
    """ViT-B/16 with its head for ImageNet, as the original Flax code has it: attention in three axes, 64 the last."""
    width, heads, depth = 768, 12, 64
    tree: Shapes = {"cls": (1, 1, width), "pos_embedding": (1, 197, width)}
    tree |= {"embedding/kernel": (16, 16, 3, width), "embedding/bias": (width,)}
    for layer in (f"encoderblock_{index}" for index in range(12)):
        tree |= _norm(f"{layer}/LayerNorm_0", width)
        for name in ("query", "key", "value"):
            tree[f"{layer}/attention/{name}/kernel"] = (width, heads, depth)
            tree[f"{layer}/attention/{name}/bias"] = (heads, depth)
        tree[f"{layer}/attention/out/kernel"] = (heads, depth, width)
        tree[f"{layer}/attention/out/bias"] = (width,)
        tree |= _norm(f"{layer}/LayerNorm_1", width)
        tree |= _dense(f"{layer}/mlp/Dense_0", width, 4 * width)
        tree |= _dense(f"{layer}/mlp/Dense_1", 4 * width, width)
    return tree | _norm("encoder_norm", width) | _dense("head", width, 1000)


def small400() -> Shapes:
    """400 leaves of some 250,000 parameters, 98 M in all: what starting a step on a leaf costs."""
    ten = [(512, 512)] * 4 + [(1024, 256)] * 2 + [(384, 768), (512, 1024), (256, 256), (512,)]
    return {f"{group}/{index}": shape for group in range(40) for index, shape in enumerate(ten)}


def tiny() -> Shapes:
    """For tests on a CPU: a leaf of each kind."""
    return {"embedding": (128, 64), "kernel": (64, 512), "bias": (512,), "scale": ()}


def _dense(path: str, inputs: int, outputs: int) -> Shapes:
    return {f"{path}/kernel": (inputs, outputs), f"{path}/bias": (outputs,)}


def _norm(path: str, width: int) -> Shapes:
    return {f"{path}/scale": (width,), f"{path}/bias": (width,)}


SHAPES = {make.__name__: make for make in (single, llama1b, gpt2, vit_b, small400, tiny)}


def tree_of(name: str, small: bool = False) -> Shapes:
    """The tree of that name; `small` cuts every long axis to about a sixteenth, leaf by leaf, for a try on a CPU."""
    tree = SHAPES[name]()
    if not small:
        return tree
    return {path: tuple(min(axis, max(64, -(-axis // 16))) for axis in shape) for path, shape in tree.items()}


def parameters(tree: Shapes) -> int:
    return sum(math.prod(shape) for shape in tree.values())
