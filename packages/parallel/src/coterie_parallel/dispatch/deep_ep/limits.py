"""What DeepEP can do, as sentences with the numbers at fault and values that would work."""

import torch

__all__ = ["batch_problems", "layout_problems"]

HIDDEN_MULTIPLE = 256
MAX_CHOICES = 32
MAX_EXPERTS = 2048
MAX_LOCAL_EXPERTS = {"EPBuffer": 256, "ElasticBuffer": 256, "Buffer": 128}
MAX_RANKS = 1024
# V1 copies a token in two halves through 8 KiB of shared memory, of which a barrier takes 8 bytes.
MAX_HIDDEN_V1 = 7936
# Sizes for which V1 has tuned settings; beyond 8 ranks it crosses nodes, and then it always reads counts on the host.
RANKS_V1 = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
MAX_NODE_RANKS_V1 = 8


def layout_problems(surface: str, *, num_experts: int, expert_degree: int, read_counts: bool) -> list[str]:
    """Return why ``surface`` can not serve ``num_experts`` experts over ``expert_degree`` ranks."""
    found = []
    if surface == "Buffer":
        if expert_degree not in RANKS_V1:
            found.append(
                f"expert degree ({expert_degree}) must be one of {', '.join(map(str, RANKS_V1))} with Buffer of DeepEP "
                'V1; use dispatcher "all_to_all", or a DeepEP with ElasticBuffer or EPBuffer'
            )
        elif expert_degree > MAX_NODE_RANKS_V1 and not read_counts:
            found.append(
                f"Buffer of DeepEP V1 reads the counts on the host over {expert_degree} ranks, more than "
                f'{MAX_NODE_RANKS_V1}: set overflow to "exact", or use a DeepEP with ElasticBuffer or EPBuffer'
            )
    elif expert_degree > MAX_RANKS:
        found.append(f"expert degree ({expert_degree}) must be at most {MAX_RANKS} with {surface} of DeepEP")
    if surface != "Buffer" and num_experts > MAX_EXPERTS:
        found.append(f"num_experts ({num_experts}) must be at most {MAX_EXPERTS} with {surface} of DeepEP")
    num_local, most = num_experts // max(1, expert_degree), MAX_LOCAL_EXPERTS[surface]
    if num_local > most:
        found.append(
            f"experts of one rank ({num_experts} / {expert_degree} = {num_local}) must be at most {most} with "
            f"{surface} of DeepEP; an expert degree of {-(-num_experts // most)} or more would do"
        )
    return found


def batch_problems(
    surface: str, *, width: int, num_choices: int, dtype: torch.dtype, device: str, needed_device: str
) -> list[str]:
    """Return why ``surface`` can not send tokens of this width, dtype and device."""
    found = []
    if device != needed_device:
        found.append(
            f'x_TD is on {device}, and DeepEP moves rows between GPUs only: use dispatcher "all_to_all" on {device}'
        )
    if dtype != torch.bfloat16:
        found.append(f"dtype of x_TD ({dtype}) must be torch.bfloat16 with DeepEP; cast the tokens")
    if width < 1 or width % HIDDEN_MULTIPLE:
        low = width // HIDDEN_MULTIPLE * HIDDEN_MULTIPLE
        nearest = f"{low} or {low + HIDDEN_MULTIPLE}" if low else str(HIDDEN_MULTIPLE)
        found.append(f"width of x_TD ({width}) must be a multiple of {HIDDEN_MULTIPLE} with DeepEP; nearest: {nearest}")
    elif surface == "Buffer" and width > MAX_HIDDEN_V1:
        found.append(f"width of x_TD ({width}) must be at most {MAX_HIDDEN_V1} with Buffer of DeepEP V1")
    if not 1 <= num_choices <= MAX_CHOICES:
        found.append(f"choices of a token ({num_choices}) must be from 1 to {MAX_CHOICES} with DeepEP")
    return found
