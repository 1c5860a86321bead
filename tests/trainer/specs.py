"""Small model specs that the trainer's tests share, one for each feature of the decoder."""

from coterie_export import ModelSpec

_TINY = dict(
    vocab_size=64,
    d_model=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    norm_eps=1e-6,
    norm_placement="pre",
    qk_norm=None,
    rope_theta=10000.0,
    max_sequence_length=32,
    num_dense_layers=1,
    dense_hidden=24,
    num_experts=8,
    top_k=2,
    expert_hidden=8,
    shared_hidden=0,
    score_function="softmax",
    renormalize=True,
    route_scale=1.0,
    selection_bias=False,
    tied_embeddings=True,
    bos_id=None,
    eos_id=0,
    pad_id=None,
)

SPECS = {
    "qk_norm_head": ModelSpec(**_TINY | dict(qk_norm="head")),
    "qk_norm_width": ModelSpec(**_TINY | dict(qk_norm="width", tied_embeddings=False)),
    "post_norm": ModelSpec(**_TINY | dict(norm_placement="post", qk_norm="width", num_dense_layers=0)),
    "shared_expert": ModelSpec(
        **_TINY | dict(shared_hidden=12, score_function="sigmoid", selection_bias=True, route_scale=2.5)
    ),
    "plain_renormalize_off": ModelSpec(**_TINY | dict(renormalize=False, num_kv_heads=4)),
}

DEMO = ModelSpec(
    **_TINY
    | dict(
        vocab_size=4096,
        d_model=192,
        num_layers=4,
        num_heads=6,
        head_dim=32,
        qk_norm="head",
        max_sequence_length=256,
        dense_hidden=512,
        num_experts=16,
        top_k=4,
        expert_hidden=128,
    )
)
