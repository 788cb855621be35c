"""What compression does to the numbers, and what it did not touch and why."""

from __future__ import annotations

from dashboards.panels import Panel, Query, Row, dashboard
from dashboards.queries import LOSSLESS, by_rank, increase, rate, ratio, series, total

_RANK = "rank {{rank}} {{instance}}"
_OF_RANK = "job, instance"
_ERROR = f"max by (codec) ({series('quantization_error_ratio')} > 0)"


def _share_of_samples(metric: str) -> str:
    return ratio(rate(metric, by=_OF_RANK), rate("sampled_blocks_total", by=_OF_RANK))


_ERRORS = Row(
    9,
    (
        Panel(
            "Error of one encoding",
            "Length of what an encoding loses over length of what it encodes, of the latest sampled blocks; the largest of all "
            "ranks. About 4.8 % for squinch6 on gradients; a mean over ranks has been encoded twice.",
            "percentunit",
            (Query(_ERROR, "{{codec}}"),),
        ),
        Panel(
            "Signal to noise",
            "The same in decibels, of the worst rank: about 26 dB for squinch6 on Gaussian gradients. More is better.",
            "dB",
            (Query(f"-20 * log10({_ERROR})", "{{codec}}"),),
        ),
        Panel(
            "Error by rank",
            "Of the latest sample of each rank. One rank far above the others has other gradients than they have.",
            "percentunit",
            (Query(by_rank(series("quantization_error_ratio")), "rank {{rank}} {{codec}}"),),
        ),
    ),
)

_BLOCKS = Row(
    9,
    (
        Panel(
            "Non-finite blocks",
            "Blocks (of squinch6: 8 values) with an infinity or a NaN, encoded within the last few scrapes. A few now and then are "
            "what loss scaling looks for; many, again and again: the training diverges.",
            "short",
            (Query(by_rank(increase("nonfinite_blocks_total", by=_OF_RANK)), _RANK),),
        ),
        Panel(
            "Saturated blocks",
            "Share of the sampled blocks with the codec's largest scale: larger values were cut off. Should be 0.",
            "percentunit",
            (Query(by_rank(_share_of_samples("saturated_blocks_total")), _RANK),),
        ),
        Panel(
            "Underflow blocks",
            "Share of the sampled blocks with the codec's smallest scale: some of their values may have become 0. Scale the loss up.",
            "percentunit",
            (Query(by_rank(_share_of_samples("underflow_blocks_total")), _RANK),),
        ),
    ),
)

_UNCOMPRESSED = Row(
    9,
    (
        Panel(
            "Left uncompressed, by reason",
            "Calls a second that could have been compressed and were not. small: below SQUINCH_MIN_COMPRESS_BYTES. dtype, op: a "
            "codec cannot serve them. crossover: raw is faster. lossless, not_gradient: what the program asked for.",
            "ops",
            (Query(rate("uncompressed_total", by="reason"), "{{reason}}"),),
            stacked=True,
        ),
        Panel(
            "Raw bytes by codec",
            "How much of the traffic each codec carries, counted before encoding. `none` is lossless.",
            "Bps",
            (Query(rate("raw_bytes_total", by="codec"), "{{codec}}"),),
            stacked=True,
        ),
        Panel(
            "Lossless share by operation",
            "Share of each operation's raw bytes that travels lossless. Gradients are allreduce or reduce_scatter.",
            "percentunit",
            (
                Query(
                    ratio(rate("raw_bytes_total", LOSSLESS, by="op"), rate("raw_bytes_total", by="op")),
                    "{{op}}",
                ),
            ),
        ),
    ),
)

_MEMORY = Row(
    8,
    (
        Panel(
            "Compression by operation",
            "Raw bytes for each byte sent, all codecs together.",
            "none",
            (Query(ratio(rate("raw_bytes_total", by="op"), rate("sent_wire_bytes_total", by="op")), "{{op}}"),),
        ),
        Panel(
            "Residuals of error feedback",
            "Length of what error feedback carries over to the next step, by rank. It settles within some hundred steps; one that "
            "climbs on means that the codec loses more than it sends. None without error feedback.",
            "short",
            (Query(by_rank(total(series("residual_norm"), "job, instance")), _RANK),),
        ),
    ),
)

NUMERICS = dashboard(
    "Numerics", "Errors of encoding, non-finite values, what stayed uncompressed.", (_ERRORS, _BLOCKS, _UNCOMPRESSED, _MEMORY)
)
