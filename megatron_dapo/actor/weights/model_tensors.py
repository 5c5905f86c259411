"""The tensors of a model, by Megatron's names and by Hugging Face's, with their shapes. Imports no Megatron."""

from collections.abc import Mapping

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.weights.hf_files import HEAD, SafetensorsReader
from megatron_dapo.actor.weights.quantize import quantized_shapes
from megatron_dapo.actor.weights.shards import Shards

EMBEDDINGS = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"


def model_shards(hf: HFModelConfig) -> dict[str, Shards]:
    """Every parameter of the whole model in its order, by Megatron's name with the global layer number."""
    vocabulary = (hf.vocab_size, hf.hidden_size)
    shards = {EMBEDDINGS: Shards(shapes={"model.embed_tokens.weight": vocabulary})}
    for layer in range(hf.num_layers):
        for name, layer_shards in _layer_shards(hf, f"model.layers.{layer}").items():
            shards[f"decoder.layers.{layer}.{name}"] = layer_shards
    shards["decoder.final_layernorm.weight"] = Shards(shapes={"model.norm.weight": (hf.hidden_size,)}, dim=None)
    if not hf.tied:
        shards[OUTPUT_LAYER] = Shards(shapes={"lm_head.weight": vocabulary})
    return shards


def hf_shapes(
    hf: HFModelConfig, *, quantize: bool = False, shards: Mapping[str, Shards] | None = None
) -> dict[str, tuple[int, ...]]:
    """Every Hugging Face tensor of the model and its shape, in the order in which `hf_tensors` yields them; `quantize`:
    with the scales of FP8 weights. `shards`: which; None: `model_shards`."""
    chosen = model_shards(hf) if shards is None else shards
    shapes = {name: shape for each in chosen.values() for name, shape in each.shapes.items()}
    return quantized_shapes(shapes) if quantize else shapes


def check_weights(reader: SafetensorsReader, hf: HFModelConfig) -> None:
    """Whether the files hold the model of config.json. Old exports also have the head of a tied model, or each layer's
    rotary frequencies.

    Raises:
        WeightsError: a tensor is missing, has another shape or no place in the model; or the model is tied, and its
            files have a head of its own, which nothing would read.
    """
    besides = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(hf.num_layers)}
    reader.check(hf_shapes(hf), ignored=besides | ({HEAD} if reader.check_head(tied=hf.tied) else set()))


def _layer_shards(hf: HFModelConfig, layer: str) -> dict[str, Shards]:
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    hidden = hf.hidden_size
    queries, narrow = hf.num_attention_heads * hf.head_dim, hf.num_query_groups * hf.head_dim
    heads = {"q_proj": queries, "k_proj": narrow, "v_proj": narrow}

    def heads_of(kind: str, *columns: int) -> Shards:
        shapes = {f"{attention}.{name}.{kind}": (rows, *columns) for name, rows in heads.items()}
        return Shards(shapes=shapes, groups=hf.num_query_groups)

    def norm(name: str, size: int) -> Shards:
        return Shards(shapes={f"{name}.weight": (size,)}, dim=None)

    shards = {"input_layernorm.weight": norm(f"{layer}.input_layernorm", hidden)}
    shards["self_attention.linear_qkv.weight"] = heads_of("weight", hidden)
    if hf.qkv_bias:
        shards["self_attention.linear_qkv.bias"] = heads_of("bias")
    if hf.qk_norm:
        for side in ("q", "k"):
            shards[f"self_attention.{side}_layernorm.weight"] = norm(f"{attention}.{side}_norm", hf.head_dim)
    output = {f"{attention}.o_proj.weight": (hidden, queries)}
    shards["self_attention.linear_proj.weight"] = Shards(shapes=output, dim=1)
    shards["pre_mlp_layernorm.weight"] = norm(f"{layer}.post_attention_layernorm", hidden)
    if hf.experts is None:
        return shards | {f"mlp.{part}": each for part, each in _gated_mlp(mlp, hidden, hf.ffn_hidden_size).items()}
    shards["mlp.router.weight"] = Shards(shapes={f"{mlp}.gate.weight": (hf.experts.count, hidden)}, dim=None)
    size, numbers = hf.experts.ffn_hidden_size, range(hf.experts.count)
    experts = [_gated_mlp(f"{mlp}.experts.{number}", hidden, size, expert=number) for number in numbers]
    # First all of one kind: a server fuses them over the experts.
    for part in experts[0]:
        shards |= {f"mlp.experts.{number}.{part}": experts[number][part] for number in numbers}
    return shards


def _gated_mlp(mlp: str, hidden: int, ffn: int, expert: int | None = None) -> dict[str, Shards]:
    gate_up = {f"{mlp}.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
    return {
        "linear_fc1.weight": Shards(shapes=gate_up, expert=expert),
        "linear_fc2.weight": Shards(shapes={f"{mlp}.down_proj.weight": (hidden, ffn)}, dim=1, expert=expert),
    }
