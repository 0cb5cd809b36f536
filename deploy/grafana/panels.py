"""Which panels there are: title, what it tells, and its queries. How Grafana wants them written is dashboard.py's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pilotfish.deploy.grafana import queries as q
from pilotfish.deploy.grafana.queries import PANEL, TOGETHER

Kind = Literal["stat", "timeseries", "heatmap", "bargauge"]


@dataclass(frozen=True)
class Query:
    """An expression and the legend of its series, in Grafana's {{label}} form. `dashed` draws a limit, not a value."""

    expression: str
    legend: str = ""
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """`stacked` adds the series up. `width` is of Grafana's 24 columns."""

    title: str
    tells: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    width: int = 8
    stacked: bool = False
    decimals: int | None = None
    maximum: float | None = None


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def stat(title: str, tells: str, unit: str, expression: str, decimals: int | None = None, legend: str = "") -> Panel:
    return Panel(title, tells, unit, (Query(expression, legend),), "stat", 4, decimals=decimals)


def quantiles(title: str, tells: str, unit: str, key: str, *matchers: str) -> Panel:
    shown = tuple(Query(PANEL.quantile(share, key, *matchers), f"p{share * 100:g}") for share in (0.5, 0.9, 0.99))
    return Panel(title, tells, unit, shown)


LENGTH = q.acceptance_length(PANEL)
CEILING = Query(f"1 + {PANEL.select('spec_decode_k')}", "ceiling, k + 1", dashed=True)
BREAK_EVEN = Query(q.break_even(PANEL), "break-even, by {{by}}", dashed=True)
BREAK_EVEN_BY_BATCH = Query(
    PANEL.gauge("spec_decode_break_even_acceptance_length", by=("sequences",)),
    "break-even, {{sequences}} at once (timed at the start)",
    dashed=True,
)

NOW = Row(
    "Now",
    (
        stat(
            "Acceptance length",
            "Committed tokens per sequence and round, bonus included: 1 .. k + 1.",
            "none",
            LENGTH,
            2,
        ),
        stat(
            "Speed-up over k = 0",
            "Tokens per round over the break-even. Below 1 speculation costs speed. By rounds timed at the start, or, "
            "without them (--no-cost-table), by a model that is rather too kind.",
            "none",
            q.speed_up(PANEL),
            2,
            "by {{by}}",
        ),
        stat(
            "Drafted tokens a round (k)",
            "0 is plain decoding.",
            "none",
            f"max by ($split) ({PANEL.select('spec_decode_k')})",
        ),
        stat("Tokens/s", "Tokens generated and counted, all requests.", "none", q.tokens_per_second(PANEL), 1),
        stat("Running", "Sequences in rounds or prefill.", "none", PANEL.gauge("num_requests_running")),
        stat("Waiting", "Sequences queued in the engine.", "none", PANEL.gauge("num_requests_waiting")),
    ),
)

ACCEPTANCE = Row(
    "Acceptance",
    (
        Panel(
            "Acceptance length over time",
            "Between break-even and the ceiling speculation pays; above the ceiling it cannot go. Break-even is what "
            "rounds at k = 0 and k took at the start, for as many sequences as ran; without them a model, rather low.",
            "none",
            (Query(LENGTH, "acceptance length"), CEILING, BREAK_EVEN, BREAK_EVEN_BY_BATCH),
            width=12,
            decimals=2,
        ),
        Panel(
            "Acceptance by draft position",
            "Accepted over drafted at that position. Falls from position to position; a flat low line is a sick head.",
            "percentunit",
            (Query(q.acceptance_by_position(PANEL), "position {{position}}"),),
            width=12,
            maximum=1,
        ),
        Panel(
            "Tokens committed by one round",
            "Rounds by the tokens they added to a sequence: mass at 1 is wasted drafting, "
            "mass at the top asks for a larger k.",
            "none",
            (Query(q.committed_buckets(TOGETHER), "{{le}}"),),
            kind="heatmap",
            width=12,
        ),
        Panel(
            "Acceptance length of whole requests",
            "The spread over requests: text that drafts badly is the lower line.",
            "none",
            tuple(
                Query(PANEL.quantile(share, "spec_decode_request_acceptance_length"), f"p{share * 100:g}")
                for share in (0.1, 0.5, 0.9)
            ),
            width=12,
            decimals=2,
        ),
    ),
)

PAYING = Row(
    "Is speculation paying?",
    (
        Panel(
            "Tokens/s, and those of k = 0",
            "At k = 0: the same load, with rounds that take what those timed at the start took. By model, where none "
            "were timed: with rounds of verify, choose, accept and report alone, as if k + 1 rows cost what one costs; "
            "where they cost more, that line is too low. The sweep measures k = 0 itself.",
            "none",
            (
                Query(q.tokens_per_second(PANEL), "measured"),
                Query(q.plain_tokens_per_second(PANEL), "at k = 0, by {{by}}", dashed=True),
            ),
        ),
        Panel(
            "Tokens per round against break-even",
            "Speculation pays while the solid line is above the dashed one.",
            "none",
            (Query(q.committed_per_round(PANEL), "tokens per round and sequence"), BREAK_EVEN),
            decimals=2,
        ),
        Panel(
            "Drafted tokens by fate",
            "Rejected drafts are the work that gave nothing.",
            "none",
            (
                Query(PANEL.rate("spec_decode_num_accepted_tokens_total"), "accepted/s"),
                Query(
                    PANEL.rate("spec_decode_num_draft_tokens_total")
                    + " - "
                    + PANEL.rate("spec_decode_num_accepted_tokens_total"),
                    "rejected/s",
                ),
            ),
            stacked=True,
        ),
    ),
)

THROUGHPUT = Row(
    "Rounds",
    (
        Panel(
            "Tokens/s",
            "Generated, and prompt tokens processed.",
            "none",
            (
                Query(q.tokens_per_second(PANEL), "generated"),
                Query(PANEL.rate("prefill_tokens_total"), "prompt"),
            ),
        ),
        Panel(
            "Rounds/s",
            "By how they ran: a captured graph replayed (a hit), or operator by operator (a miss; always so on a CPU).",
            "none",
            (Query(PANEL.rate("rounds_total", by=("path",)), "{{path}}"),),
            stacked=True,
        ),
        Panel(
            "Seconds of a round by phase",
            "Averages; they add up to the round.",
            "s",
            (Query(q.seconds_by_phase(PANEL), "{{phase}}"),),
            stacked=True,
        ),
        Panel(
            "Share of rounds from captured graphs",
            "Below 100 % on a GPU, rounds meet shapes that were not captured.",
            "percentunit",
            (Query(q.graph_share(PANEL), "graphs"),),
            maximum=1,
        ),
        Panel(
            "Kernels compiled while serving",
            "Each one made a round wait; all ought to be compiled before the server is ready.",
            "none",
            (Query(PANEL.rate("kernels_compiled_total"), "kernels/s"),),
        ),
        Panel(
            "Busy share of the engine",
            "Time in steps over time passed; what is left is idle.",
            "percentunit",
            (
                Query(PANEL.rate("step_seconds", suffix="sum"), "all steps"),
                Query(PANEL.rate("round_seconds", 'phase="prefill"', suffix="sum"), "prefill"),
            ),
        ),
        Panel(
            "Tokens of a request",
            "How long answers are.",
            "none",
            tuple(
                Query(PANEL.quantile(share, "request_generation_tokens"), f"p{share * 100:g}") for share in (0.5, 0.9)
            ),
        ),
    ),
)

CAPACITY = Row(
    "Capacity",
    (
        Panel(
            "Running, waiting and the cap",
            "Waiting while fewer run than the cap: KV pages bind, not the cap.",
            "none",
            (
                Query(PANEL.gauge("num_requests_running"), "running"),
                Query(PANEL.gauge("num_requests_waiting"), "waiting"),
                Query(PANEL.gauge("max_num_seqs", by=("limit",)), "cap, set by {{limit}}", dashed=True),
            ),
        ),
        Panel(
            "Sequences that each limit allows",
            "The cap is set by one of them. KV pages are counted for sequences of the full context.",
            "none",
            (Query(PANEL.gauge("concurrency_limit", by=("limit",)), "{{limit}}"),),
            kind="bargauge",
        ),
        Panel(
            "Waiting per place",
            "Above 1 a new request waits for more than one to end: scale out.",
            "none",
            (Query(q.mean_wait(PANEL), "waiting / cap"),),
            decimals=2,
        ),
        Panel(
            "KV cache",
            "Pages reserved over pages there are. Admission reserves a request's worst case.",
            "percentunit",
            (Query(f"{PANEL.gauge('kv_pages_used')} / {PANEL.gauge('kv_pages')}", "reserved"),),
            maximum=1,
        ),
        Panel(
            "State slots",
            "Recurrent-state slots taken, and there are.",
            "none",
            (
                Query(PANEL.gauge("state_slots_used"), "taken"),
                Query(PANEL.gauge("state_slots"), "there are", dashed=True),
            ),
        ),
        Panel(
            "Memory ledger",
            "As counted at the start, but for what is free, beside which the others would be hairlines.",
            "bytes",
            (Query(PANEL.gauge("memory_bytes", 'part!="free"', by=("part",)), "{{part}}"),),
            kind="bargauge",
        ),
        Panel(
            "Memory in use",
            "When the engine was last idle; on a CPU of its process, on a GPU of the device. What grows is a leak.",
            "bytes",
            (Query(PANEL.gauge("memory_used_bytes"), "in use"),),
        ),
    ),
)

PREFIX_CACHE = Row(
    "Prefix cache",
    (
        Panel(
            "Share of prompt tokens that were kept",
            "Near 1 for conversations and agents, near 0 where each prompt is new.",
            "percentunit",
            (Query(q.hit_share(PANEL), "kept"),),
            maximum=1,
        ),
        Panel(
            "Prompt tokens by where they come from",
            "Kept ones were not read again. A cut ends a hit: of each turn the rest is read.",
            "none",
            (
                Query(PANEL.rate("prefix_cache_hits_total"), "kept/s"),
                # not those looked for less those kept: a prompt finds some long after it was admitted
                Query(PANEL.rate("prefill_tokens_total"), "read/s"),
            ),
            stacked=True,
        ),
        Panel(
            "Misses by reason",
            "Prompts of which less was kept than the cuts allow. New prompts are misses; differs asks for a look at "
            "/v1/cache, evicted for memory.",
            "none",
            (Query(PANEL.rate("prefix_cache_misses_total", by=("reason",)), "{{reason}}"),),
            stacked=True,
        ),
        Panel(
            "Memory of the prefix cache",
            "Snapshots, and pages that nothing else holds. It gives way to requests.",
            "bytes",
            (
                Query(PANEL.gauge("prefix_cache_bytes"), "kept"),
                Query(PANEL.gauge("prefix_cache_capacity_bytes"), "at most", dashed=True),
            ),
        ),
        Panel(
            "Snapshots",
            "Places where prompts can be gone on with, and those that gave way in a minute: as many as are kept, again "
            "and again, are more conversations than fit.",
            "none",
            (
                Query(PANEL.gauge("prefix_cache_snapshots"), "kept"),
                Query("60 * " + PANEL.rate("prefix_cache_evictions_total"), "evicted/min"),
            ),
        ),
        Panel(
            "Lines left out of system prompts",
            "They change with every request: with them nothing would be kept.",
            "none",
            (Query(PANEL.rate("volatile_lines_left_out_total", by=("line",)), "{{line}}"),),
        ),
    ),
)

LATENCY = Row(
    "Latency",
    (
        Panel(
            "Queue",
            "p90 from submission to admission, by the API key's label.",
            "s",
            (Query(PANEL.quantile(0.9, "request_queue_time_seconds", by=("key",)), "{{key}}"),),
        ),
        quantiles("Time to first token", "From arrival, queue included.", "s", "time_to_first_token_seconds"),
        quantiles(
            "Time per token",
            "After the first; the tokens of one round share its time.",
            "s",
            "inter_token_latency_seconds",
        ),
        quantiles("Whole requests", "From arrival to the end.", "s", "e2e_request_latency_seconds"),
    ),
)

REQUESTS = Row(
    "Requests",
    (
        Panel(
            "Ends by reason",
            "stop and length are answers; abort is a client that left; error is ours.",
            "none",
            (Query(PANEL.rate("request_finished_total", by=("finish_reason",)), "{{finish_reason}}"),),
            stacked=True,
        ),
        Panel(
            "Refusals by reason",
            "queue_full is load; invalid, unauthorized, too_large and not_found are the clients'; the rest is ours.",
            "none",
            (Query(PANEL.rate("request_rejected_total", by=("reason",)), "{{reason}}"),),
            stacked=True,
        ),
        Panel(
            "Tokens/s by API key",
            "A key's label in the key file, or its number in the order of --api-key; none where there are no keys.",
            "none",
            (Query(PANEL.rate("key_generation_tokens_total", by=("key",)), "key {{key}}"),),
            stacked=True,
        ),
        Panel(
            "Requests/s by API key",
            "Answered or not.",
            "none",
            (Query(PANEL.rate("key_requests_total", by=("key",)), "key {{key}}"),),
            stacked=True,
        ),
        Panel(
            "Exactness",
            "Finished requests decoded again at k = 0 (--audit-rate). Requests that differ must stay 0.",
            "none",
            (
                Query(PANEL.rate("exactness_checked_tokens_total"), "tokens/s checked"),
                Query(PANEL.gauge("exactness_mismatched_requests_total"), "requests that differ"),
                Query(PANEL.gauge("nan_requests_total"), "requests with NaN"),
            ),
        ),
        Panel(
            "Engine up",
            "0 while it loads or after it failed.",
            "none",
            (Query(PANEL.select("engine_up"), "{{instance}}"),),
        ),
        Panel(
            "Time since the engine was ready",
            "A drop to 0 is a restart.",
            "s",
            (Query(f"time() - {PANEL.select('engine_ready_timestamp_seconds')}", "{{instance}}"),),
        ),
    ),
)

ROWS = (NOW, ACCEPTANCE, PAYING, THROUGHPUT, CAPACITY, PREFIX_CACHE, LATENCY, REQUESTS)
