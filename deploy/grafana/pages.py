"""The dashboards: overview, request path, router and cache, workers, broker, batches."""

from __future__ import annotations

from deploy.grafana.panels import Dashboard, Panel, Query, level, quantiles, rate

MODEL = '{model=~"$model"}'
POOL = '{pool=~"$pool"}'
INSTANCE = '{instance=~"$instance"}'
ROUTES = '{route=~"/v1/.*|/api/.*"}'
SLA = "headrace_frontend_sla_requests_total"

ATTAINMENT = f'sum(rate({SLA}{{result="met",model=~"$model"}}[$__rate_interval])) / sum(rate({SLA}{MODEL}[$__rate_interval]))'
HITS = (
    f"sum by (model) (rate(headrace_frontend_cached_tokens_total{MODEL}[$__rate_interval]))"
    f" / sum by (model) (rate(headrace_frontend_prompt_tokens_total{MODEL}[$__rate_interval]))"
)
LOST = (
    "sum(rate(headrace_router_overlap_lost_tokens_total[$__rate_interval]))"
    " / sum(rate(headrace_router_overlap_found_tokens_total[$__rate_interval]))"
)

OVERVIEW = Dashboard(
    uid="headrace-overview",
    title="Headrace: overview",
    about="Is the service well? Goodput, latencies, queues and faults of the whole deployment.",
    variables={"model": SLA, "pool": "headrace_router_workers"},
    panels=[
        Panel(
            title="Goodput",
            queries=[rate(SLA, where='{result="met",model=~"$model"}')],
            unit="reqps",
            stat=True,
            about="Answers that met both targets, per second.",
        ),
        Panel(title="Attainment", queries=[Query(expr=ATTAINMENT)], unit="percentunit", stat=True, limit=0.95, bad_below=True),
        Panel(title="Open requests", queries=[level("headrace_ingress_open_requests")], stat=True),
        Panel(title="Workers ready", queries=[level("headrace_worker_ready")], stat=True, limit=1, bad_below=True),
        Panel(
            title="Oldest waiting",
            queries=[level("headrace_router_oldest_seconds", where=POOL, how="max")],
            unit="s",
            stat=True,
            limit=30,
        ),
        Panel(title="Broker unusable", queries=[level("headrace_jetstream_unusable", how="max")], stat=True, limit=1),
        Panel(
            title="Requests by status", queries=[rate("headrace_frontend_requests_total", "status", where=ROUTES)], unit="reqps"
        ),
        Panel(
            title="Output tokens by tenant",
            queries=[rate("headrace_frontend_tenant_output_tokens_total", "tenant")],
            about="Tenants of API keys, where keys are in force; the first hundred of each frontend by name.",
        ),
        Panel(
            title="Refused by a quota, by tenant",
            queries=[rate("headrace_frontend_tenant_quota_refusals_total", "tenant")],
            unit="reqps",
        ),
        Panel(
            title="Time to first token",
            queries=quantiles("headrace_frontend_time_to_first_token_seconds", where=MODEL),
            unit="s",
            limit=2,
            about="From the request to its first token. The line is the default of frontend.target_first_token_s.",
        ),
        Panel(
            title="Time between tokens",
            queries=quantiles("headrace_frontend_inter_token_seconds", where=MODEL),
            unit="s",
            limit=0.1,
            about="As tokens leave for the client. The line is the default of frontend.target_token_s.",
        ),
        Panel(title="Answers by the targets", queries=[rate(SLA, "result", where=MODEL)], unit="reqps"),
        Panel(title="Output tokens", queries=[rate("headrace_frontend_output_tokens_total", "model", where=MODEL)], unit="ops"),
        Panel(
            title="Prompt tokens found in a cache",
            queries=[Query(expr=HITS, legend="{{model}}")],
            unit="percentunit",
            about="Share of the prompt tokens of ended requests.",
        ),
        Panel(title="Waiting by class", queries=[level("headrace_router_window", "pool", "request_class", where=POOL)]),
        Panel(title="Refused", queries=[rate("headrace_ingress_refused_total", "reason")], unit="reqps"),
        Panel(
            title="Moved and resumed",
            queries=[
                Query(expr="sum(rate(headrace_broker_moved_total[$__rate_interval])) or vector(0)", legend="moved"),
                Query(expr="sum(rate(headrace_worker_resumed_total[$__rate_interval])) or vector(0)", legend="resumed"),
            ],
            unit="reqps",
            about="Requests that went on in another worker, and those of them that had tokens already.",
        ),
    ],
)

REQUEST_PATH = Dashboard(
    uid="headrace-request-path",
    title="Headrace: request path",
    about="Where the time of a request goes, from its bytes to its last token.",
    variables={"model": SLA},
    panels=[
        Panel(title="Check, template, tokenise", queries=quantiles("headrace_frontend_prepare_seconds"), unit="s"),
        Panel(title="Store (broker's ack)", queries=quantiles("headrace_ingress_submit_seconds"), unit="s"),
        Panel(title="Wait for a placement", queries=quantiles("headrace_router_waited_seconds"), unit="s"),
        Panel(title="Start of a run to first token", queries=quantiles("headrace_worker_first_token_seconds"), unit="s"),
        Panel(
            title="Time to first token",
            queries=quantiles("headrace_frontend_time_to_first_token_seconds", "model", where=MODEL, of=(0.9,)),
            unit="s",
        ),
        Panel(
            title="Time between tokens",
            queries=quantiles("headrace_frontend_inter_token_seconds", "model", where=MODEL, of=(0.9,)),
            unit="s",
        ),
        Panel(
            title="Whole requests, p99 by route",
            queries=quantiles("headrace_frontend_request_seconds", "route", where=ROUTES, of=(0.99,)),
            unit="s",
        ),
        Panel(title="Size of requests", queries=quantiles("headrace_frontend_request_bytes"), unit="bytes"),
        Panel(title="How late the event loop is", queries=quantiles("headrace_frontend_loop_lag_seconds"), unit="s"),
        Panel(title="How requests end", queries=[rate("headrace_ingress_ended_total", "outcome")], unit="reqps"),
        Panel(
            title="Clients",
            queries=[
                Query(expr="sum(rate(headrace_frontend_disconnects_total[$__rate_interval]))", legend="left early"),
                Query(expr="sum(rate(headrace_frontend_slow_clients_total[$__rate_interval]))", legend="did not read"),
            ],
            unit="reqps",
        ),
        Panel(
            title="Connections and requests",
            queries=[
                Query(expr="sum(headrace_frontend_connections)", legend="connections"),
                Query(expr="sum(headrace_frontend_requests_in_flight)", legend="requests in flight"),
                Query(expr="sum(headrace_ingress_held_requests)", legend="held without a worker"),
            ],
        ),
        Panel(title="Missing tokens asked for", queries=[rate("headrace_ingress_token_gaps_total", "cause")], unit="ops"),
        Panel(title="Large payloads stored", queries=[rate("headrace_ingress_spilled_bytes_total")], unit="Bps"),
        Panel(title="Submitted by pool", queries=[rate("headrace_ingress_submitted_total", "pool")], unit="reqps"),
    ],
)

ROUTER = Dashboard(
    uid="headrace-router",
    title="Headrace: router and cache",
    about="What routers decide, how well they predict, and how complete their view of the caches is.",
    variables={"pool": "headrace_router_workers"},
    panels=[
        Panel(title="Waiting by class", queries=[level("headrace_router_window", "pool", "request_class", where=POOL)]),
        Panel(
            title="Oldest request", queries=[level("headrace_router_oldest_seconds", "pool", where=POOL, how="max")], unit="s"
        ),
        Panel(title="Placements by reason", queries=[rate("headrace_router_placed_total", "reason")], unit="reqps"),
        Panel(title="Refused by code", queries=[rate("headrace_router_shed_total", "code")], unit="reqps"),
        Panel(title="Time to decide", queries=quantiles("headrace_router_decision_seconds"), unit="s"),
        Panel(
            title="Time to first token, predicted and measured (p90)",
            queries=[
                *quantiles("headrace_router_ttft_predicted_seconds", of=(0.9,)),
                *quantiles("headrace_router_ttft_actual_seconds", of=(0.9,)),
            ],
            unit="s",
            about="First predicted, then measured, of the same requests.",
        ),
        Panel(title="Error of the prediction", queries=quantiles("headrace_router_ttft_error_seconds"), unit="s"),
        Panel(
            title="Cached tokens that were not there",
            queries=[Query(expr=LOST)],
            unit="percentunit",
            about="Of the tokens that the index had found at the placement.",
        ),
        Panel(
            title="Cached tokens found, lost, gained",
            queries=[
                Query(expr="sum(rate(headrace_router_overlap_found_tokens_total[$__rate_interval]))", legend="found"),
                Query(expr="sum(rate(headrace_router_overlap_lost_tokens_total[$__rate_interval]))", legend="lost"),
                Query(expr="sum(rate(headrace_router_overlap_gained_tokens_total[$__rate_interval]))", legend="gained"),
            ],
            unit="ops",
        ),
        Panel(title="Blocks in the index", queries=[level("headrace_router_index_entries", "pool", where=POOL, how="max")]),
        Panel(title="Cache events behind", queries=[level("headrace_router_stream_lag", "pool", where=POOL, how="max")]),
        Panel(title="Blocks of cache events", queries=[rate("headrace_router_kv_blocks_total", "change")], unit="ops"),
        Panel(
            title="Workers known",
            queries=[
                Query(expr='max by (pool) (headrace_router_workers{pool=~"$pool"})', legend="{{pool}} serving"),
                Query(expr='max by (pool) (headrace_router_prefill_workers{pool=~"$pool"})', legend="{{pool}} prefill"),
                Query(expr='max by (pool) (headrace_router_approximate_workers{pool=~"$pool"})', legend="{{pool}} guessed"),
            ],
        ),
        Panel(title="Snapshot", queries=[level("headrace_router_snapshot_bytes", "pool", where=POOL, how="max")], unit="bytes"),
        Panel(
            title="Where prompts are computed",
            queries=[rate("headrace_router_prefill_total", "where", "reason")],
            unit="reqps",
        ),
    ],
)

WORKERS = Dashboard(
    uid="headrace-workers",
    title="Headrace: workers",
    about="Engines, their KV caches, and what workers did with their runs.",
    variables={"instance": "headrace_worker_ready"},
    panels=[
        Panel(title="Ready", queries=[level("headrace_worker_ready", "instance", where=INSTANCE)]),
        Panel(title="Running in the engine", queries=[level("headrace_worker_engine_running", "instance", where=INSTANCE)]),
        Panel(title="Waiting in the engine", queries=[level("headrace_worker_engine_waiting", "instance", where=INSTANCE)]),
        Panel(
            title="KV blocks in use",
            queries=[
                Query(
                    expr=f"sum by (instance) (headrace_worker_engine_blocks_used{INSTANCE})"
                    f" / sum by (instance) (headrace_worker_engine_blocks{INSTANCE} > 0)",
                    legend="{{instance}}",
                )
            ],
            unit="percentunit",
        ),
        Panel(title="Blocks cached by tier", queries=[level("headrace_worker_kv_blocks", "instance", "tier", where=INSTANCE)]),
        Panel(
            title="Tokens of ended choices", queries=[rate("headrace_worker_tokens_total", "kind", where=INSTANCE)], unit="ops"
        ),
        Panel(
            title="Start of a run to first token, p90",
            queries=quantiles("headrace_worker_first_token_seconds", "instance", where=INSTANCE, of=(0.9,)),
            unit="s",
        ),
        Panel(title="How runs end", queries=[rate("headrace_worker_settled_total", "how", where=INSTANCE)], unit="reqps"),
        Panel(title="Resumed", queries=[rate("headrace_worker_resumed_total", "instance", where=INSTANCE)], unit="reqps"),
        Panel(
            title="Engine trouble",
            queries=[
                Query(expr=f"sum(rate(headrace_worker_engine_stalls_total{INSTANCE}[$__rate_interval]))", legend="stalls"),
                Query(
                    expr=f"sum(rate(headrace_worker_stuck_sequences_total{INSTANCE}[$__rate_interval])) or vector(0)",
                    legend="stuck sequences",
                ),
                Query(expr=f"sum(rate(headrace_worker_parked_total{INSTANCE}[$__rate_interval]))", legend="parked runs"),
            ],
            unit="ops",
        ),
        Panel(title="Canaries", queries=[rate("headrace_worker_canaries_total", "result", where=INSTANCE)], unit="ops"),
        Panel(title="Cache events published", queries=[level("headrace_worker_kv_ok", "instance", where=INSTANCE, how="min")]),
        Panel(title="Preempted batch runs", queries=[rate("headrace_worker_preempted_total", where=INSTANCE)], unit="reqps"),
        Panel(
            title="Parts of a remote prefill, p90",
            queries=quantiles("headrace_worker_handover_seconds", "part", where=INSTANCE, of=(0.9,)),
            unit="s",
        ),
        Panel(
            title="Start of the engine",
            queries=[level("headrace_worker_engine_start_seconds", "instance", where=INSTANCE)],
            unit="s",
        ),
    ],
)

BROKER = Dashboard(
    uid="headrace-broker",
    title="Headrace: broker",
    about="JetStream as the processes see it, leases, and moved or unreadable messages.",
    variables={},
    panels=[
        Panel(title="Connections up", queries=[level("headrace_jetstream_connections")], stat=True),
        Panel(title="Unusable", queries=[level("headrace_jetstream_unusable", how="max")], stat=True, limit=1),
        Panel(title="Publishes by outcome", queries=[rate("headrace_jetstream_publishes_total", "outcome")], unit="ops"),
        Panel(title="Broker's ack", queries=quantiles("headrace_ingress_submit_seconds"), unit="s"),
        Panel(
            title="Connection trouble",
            queries=[
                Query(expr="sum(rate(headrace_jetstream_reconnects_total[$__rate_interval]))", legend="reconnects"),
                Query(expr="sum(rate(headrace_jetstream_publish_retries_total[$__rate_interval]))", legend="publishes again"),
                Query(
                    expr="sum(rate(headrace_jetstream_dropped_sends_total[$__rate_interval])) or vector(0)",
                    legend="dropped sends",
                ),
            ],
            unit="ops",
        ),
        Panel(title="Pull loops begun anew", queries=[rate("headrace_jetstream_pull_resets_total", "reason")], unit="ops"),
        Panel(title="Follows begun anew", queries=[rate("headrace_jetstream_follow_restarts_total", "reason")], unit="ops"),
        Panel(
            title="Leases",
            queries=[
                Query(expr="sum(rate(headrace_jetstream_lease_lapses_total[$__rate_interval]))", legend="lapsed"),
                Query(expr="sum(rate(headrace_broker_leases_revoked_total[$__rate_interval]))", legend="revoked"),
                Query(expr="sum(rate(headrace_router_lease_lapses_total[$__rate_interval]))", legend="routers fenced"),
            ],
            unit="ops",
        ),
        Panel(title="Moved by reason", queries=[rate("headrace_broker_moved_total", "reason")], unit="reqps"),
        Panel(
            title="Messages that were no good",
            queries=[
                Query(expr="sum(rate(headrace_broker_malformed_total[$__rate_interval])) or vector(0)", legend="malformed"),
                Query(expr="sum(rate(headrace_broker_failed_messages_total[$__rate_interval])) or vector(0)", legend="failed"),
                Query(expr="sum(rate(headrace_ingress_fenced_frames_total[$__rate_interval]))", legend="fenced rows"),
            ],
            unit="ops",
        ),
    ],
)

BATCHES = Dashboard(
    uid="headrace-batches",
    title="Headrace: batches and stored jobs",
    about="Work that outlives its client: jobs, batches and files.",
    variables={},
    panels=[
        Panel(title="Jobs carried", queries=[level("headrace_jobs_carried", "state")]),
        Panel(title="Jobs ended", queries=[rate("headrace_jobs_ended_total", "status")], unit="reqps"),
        Panel(title="From storing to result", queries=quantiles("headrace_jobs_seconds"), unit="s"),
        Panel(title="Batches carried", queries=[level("headrace_batch_carried")]),
        Panel(title="Lines", queries=[rate("headrace_batch_lines_total", "what")], unit="ops"),
        Panel(title="Batches ended", queries=[rate("headrace_batch_ended_total", "status")], unit="ops"),
        Panel(
            title="Tokens of jobs",
            queries=[
                Query(
                    expr='sum(rate(headrace_frontend_prompt_tokens_total{source="job"}[$__rate_interval])) or vector(0)',
                    legend="prompt",
                ),
                Query(
                    expr='sum(rate(headrace_frontend_output_tokens_total{source="job"}[$__rate_interval])) or vector(0)',
                    legend="output",
                ),
            ],
            unit="ops",
        ),
        Panel(
            title="Given up or tried again",
            queries=[
                Query(expr="sum(rate(headrace_jobs_left_total[$__rate_interval])) or vector(0)", legend="jobs left"),
                Query(expr="sum(rate(headrace_jobs_retried_total[$__rate_interval])) or vector(0)", legend="jobs retried"),
                Query(expr="sum(rate(headrace_batch_retries_total[$__rate_interval])) or vector(0)", legend="batch steps"),
            ],
            unit="ops",
        ),
        Panel(
            title="Files",
            queries=[
                Query(expr="sum(rate(headrace_files_written_bytes_total[$__rate_interval]))", legend="written"),
                Query(expr="sum(rate(headrace_files_read_bytes_total[$__rate_interval]))", legend="read"),
            ],
            unit="Bps",
        ),
    ],
)

DASHBOARDS = (OVERVIEW, REQUEST_PATH, ROUTER, WORKERS, BROKER, BATCHES)
