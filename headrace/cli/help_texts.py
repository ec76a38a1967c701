"""Holds the long texts of `--help`."""

from __future__ import annotations

EXIT_CODES = (
    """exit codes: 0 clean, 1 failure, 2 wrong command line, 69 NATS server unreachable, 70 engine died, 78 wrong settings"""
)

# The options that `--help` shows; `--help-all` shows the others too.
_USUAL = {
    "up": "--config --data-dir --nats --verbose --mode --workers --prefill-workers --decode-workers --routers --grace --host "
    "--port --engine --model --served-name --slots --engine-arg",
    "frontend": "--config --nats --host --port --deadline --max-body --drain-grace --log-level",
    "worker": "--config --data-dir --nats --engine --model --served-name --name --role --slots --engine-arg --tool-parser "
    "--reasoning-parser --drain-grace --metrics-port",
    "router": "--config --nats --name --model --window --policy --router-metrics-port --drain-grace",
}
USUAL = {command: frozenset(flags.split()) for command, flags in _USUAL.items()}

MAIN = f"""examples:
  headrace up                                     the bundled small model on http://127.0.0.1:8000
  headrace demo                                   an answer survives the worker that writes it
  headrace up --engine sim --workers 2            the simulator: no model, ready at once
  headrace up --mode disagg                       one worker computes prompts, another one the answers
  headrace up --model Qwen/Qwen3-0.6B --port 9000
  headrace frontend --nats nats://broker:4222     one part alone, on any machine
  headrace worker --engine vllm --model M --nats nats://broker:4222
  headrace router --nats nats://broker:4222
  headrace submit questions.jsonl --out answers.jsonl
  headrace streams status
  headrace dlq ls                                 requests that were taken out of service
  headrace doctor                                 what is wrong with this machine, the server or the deployment
  headrace help up                                the usual options of a command; `headrace up --help-all`: all of them

Every setting is a flag, an environment variable HEADRACE_… or a key of a TOML file (--config, HEADRACE_CONFIG or
./headrace.toml), in this order; `headrace config` shows what is in force. Durations are seconds.

{EXIT_CODES}"""

UP = """examples:
  headrace up
  headrace up --engine sim --workers 4 --port 0
  headrace up --mode disagg --prefill-workers 2 --decode-workers 2
  headrace up --model ./my-model --engine-arg max_model_len=4096 --engine-arg enforce_eager=true
  headrace up --nats nats://broker:4222           with an existing NATS server

Runs nats-server, one frontend and the workers as processes of their own and restarts what crashes. Ctrl-C stops all of
them and lets workers finish first; a second Ctrl-C kills them. <data-dir>/run/up.json says what runs where."""

FRONTEND = """example:
  headrace frontend --nats nats://broker:4222 --host 0.0.0.0 --auth keys

SIGTERM finishes running answers first; a second one, or Ctrl-C, stops at once."""

WORKER = """examples:
  headrace worker --engine sim --nats nats://broker:4222
  headrace worker --engine vllm --model Qwen/Qwen3-0.6B --engine-arg gpu_memory_utilization=0.8
  headrace worker --engine sim --role prefill     computes prompts for workers in the role decode
  headrace worker status                          the workers that run, their roles and what they hold
  headrace worker drain worker-1                  ask a worker anywhere to finish and leave
  headrace worker role worker-1 prefill           give it another role
  headrace worker adapter load sql /adapters/sql --model M
  headrace worker health worker-1                 whether it, and its engine, can serve
  headrace worker sleep worker-1                  finish, free the engine's memory, keep the process
  headrace worker wake worker-1

SIGTERM drains: no new work, running work is finished or handed over. A second one, or Ctrl-C, stops at once."""

ROLE = """examples:
  headrace worker role worker-2 prefill
  headrace worker role prefill-1 decode --grace 10 --nats nats://broker:4222

Returns when the worker serves in its new role. What it cannot finish within --grace goes on elsewhere. Only roles that its
engine was started for are possible: `headrace worker status` shows them."""

ADAPTER_STORE = """examples:
  headrace adapter push sql ./out/sql
  headrace adapter ls
  headrace worker adapter load sql store://sql --model Qwen/Qwen3-0.6B
  headrace adapter rm sql

The folder has adapter_config.json and adapter_model.safetensors, as PEFT writes them. Pushing a name again replaces it for
workers that load it from then on."""

ADAPTER = """examples:
  headrace worker adapter load sql /adapters/sql --model Qwen/Qwen3-0.6B
  headrace worker adapter load sql /adapters/sql --worker worker-2
  headrace worker adapter load sql store://sql --model Qwen/Qwen3-0.6B
  headrace worker adapter unload sql --model Qwen/Qwen3-0.6B --grace 10

Returns when it is served, or gone, everywhere. A vLLM worker takes adapters if it was started with some or with
--engine-arg enable_lora=true (and max_loras, max_lora_rank). They are gone when the worker's process ends."""

CHAT = """examples:
  headrace chat
  headrace chat --model Qwen/Qwen3-0.6B --system 'Answer in one sentence.'
  headrace chat 'Why is the sky blue?'
  git diff | headrace chat 'Write a commit message:'

Lines that begin with / are commands: /help lists them. Ctrl-C ends an answer, Ctrl-D the chat. Without a terminal one answer
is printed. A key is read from HEADRACE_API_KEY."""

COMPLETION = """examples:
  source <(headrace completion bash)      in this shell, or in ~/.bashrc for all
  headrace completion bash > ~/.local/share/bash-completion/completions/headrace
  headrace completion zsh > ~/.zfunc/_headrace                  a folder of $fpath
  headrace completion fish > ~/.config/fish/completions/headrace.fish"""

TOP = """examples:
  headrace top                            q quits, s sorts by load, KV, tokens/s or name
  headrace top --once
  headrace top --json | jq '.workers[].running'

Tokens/s and step times are those of each engine's last step. NO_COLOR turns colours off; no colour says more than the words."""

TRACE = """examples:
  headrace trace chatcmpl-5f0c2a          the id of an answer, or of the request in the log
  headrace trace my-request-7 --json      what the client sent as x-request-id

Frontends remember their open requests and the last 4,096 that ended, routers why they placed one. Of older requests, and
after a restart of the frontend, the stored records of placements are shown (two days)."""

DRAIN = """example:
  headrace worker drain worker-1 --grace 120 --nats nats://broker:4222

Returns when the worker has accepted, with --wait when it has left. Its process ends with code 0 when its work is done or handed
over."""


HEALTH = """examples:
  headrace worker health worker-1
  headrace worker health worker-1 --json --timeout 2

The engine is asked for one token unless it sleeps or is paused. Exit codes: 0 healthy, 1 not, or no answer."""

SLEEP = """examples:
  headrace worker sleep worker-1
  headrace worker sleep worker-1 --level 2 --grace 5

Takes nothing new, finishes or hands over its work, and then has the engine free its memory; what was freed is measured. Its
process and its place among the workers stay. `headrace worker wake`, or a router with --wake-on-demand, ends the sleep. On a
GPU vLLM needs --engine-arg enable_sleep_mode=true."""

PAUSE = """examples:
  headrace worker pause worker-1
  headrace worker pause worker-1 --grace 30

Without --grace running answers stand still and go on at `headrace worker resume`; their deadlines do not wait."""

PROFILE = """examples:
  headrace worker profile start worker-1
  headrace worker profile stop worker-1

vLLM needs --engine-arg 'profiler_config={"profiler": "torch", "torch_profiler_dir": "FOLDER"}', the simulator
--engine-arg profile_dir=FOLDER."""

ROUTER = """examples:
  headrace router --nats nats://broker:4222       place the requests of all models
  headrace router --model Qwen/Qwen3-0.6B --window 4096
  headrace router status                          the routers that run, and what they hold
  headrace router explain REQUEST-ID              why a request is where it is

Any number of routers share the work; without one, workers place requests on themselves. SIGTERM finishes what is being
placed, gives the rest back and leaves; a second one, or Ctrl-C twice, stops at once."""

EXPLAIN = """example:
  headrace router explain 68a1f0c2… --nats nats://broker:4222

The id is the one of the answer (`id` without its prefix `chatcmpl-` or `cmpl-`, which may stay). Asks every live router; each
remembers its last decisions only."""


DLQ = """examples:
  headrace dlq ls --nats nats://broker:4222
  headrace dlq show 17
  headrace dlq retry 17 --keep                    once more, as a new request; the answer is printed here
  headrace dlq drop 17 18
  headrace dlq drop --older-than 604800

A letter is named by its number or by the id of its request. A request that crashed its workers may crash as many more when it
is run again."""

KEYS = """examples:
  headrace keys create alice                      a key for the tenant alice, printed once
  headrace keys create ci --tenant acme --scope generate,models --model 'Qwen/*' --expires 90d
  headrace keys create app --rpm 600 --tpm 100000 --concurrent 32 --tenant-tokens-per-day 20000000
  headrace keys create gateway --scope generate,embed,models,act_as
  headrace keys ls
  headrace keys rotate ci --grace 1h
  headrace keys revoke alice

scopes: generate, embed, tokens, models, stored, files, batches (these are the default); priority, direct (choosing workers and
asking why), act_as (other tenants by x-headrace-tenant), metrics, admin. All frontends obey within a second."""

TENANT = """examples:
  headrace tenant export acme --out acme-data     all that is stored of acme, with a manifest
  headrace tenant delete acme                     says what would be deleted
  headrace tenant delete acme --yes               deletes it; run again after an interruption

A tenant is named as its keys and headers name it; `_` is that of requests without one. The keys of a deleted tenant are revoked
and stay listed. Not among it: logs, and what the nats-server's disk still holds of deleted messages."""

AUDIT = """examples:
  headrace audit ls --tenant acme --since 24
  headrace audit follow --json                    with their content, where that is recorded
  headrace audit keep --days 90 --mib 2048

Frontends record requests only with --audit metadata or --audit content."""

CHAOS = """examples:
  headrace chaos --minutes 3 --seed 7
  headrace chaos --mode disagg --fault 'prefill kill' --fault 'nats restart'

Brings up a deployment of its own on this machine and takes it down again; it touches no other one. The same seed gives the same
faults and requests; what they meet differs from run to run. Every answer is compared with what the simulator must say.

exit codes: 0 every promise was kept, 1 one was broken (the report names it, and where the logs are)"""

SUBMIT = """examples:
  headrace submit questions.jsonl --out answers.jsonl
  headrace submit questions.jsonl --out answers.jsonl --request-model Qwen/Qwen3-0.6B --open 1000

exit codes: 0 every line has an answer, 1 some have an error; both are in the output"""

JOBS = """examples:
  headrace jobs ls
  headrace jobs show greeting
  headrace jobs cancel greeting
  headrace jobs watch greeting"""

PLANNER = """examples:
  headrace planner                                   say what it would do, beside a running `headrace up`
  headrace planner --mode act --most 4               start and drain workers of that `up`
  headrace planner --mode act --start-command ./more-workers
  headrace planner --mode act --kubernetes           scale the workers of this pod's namespace
  headrace planner replay --last 7d                  what it would have made of the recorded placements
  headrace planner profile --out speeds.json         measure what engine steps cost, to plan by from the beginning

/desired of its page has the numbers for autoscalers, /metrics the same as headrace_planner_*.
"""

PLANNER_PROFILE = """examples:
  headrace planner profile --out speeds.json         then: headrace planner --profile speeds.json
  headrace planner profile http://gateway:8000 --streams 1,8,64 --words 100,2000 --seconds 30
  headrace planner profile --listen --seconds 600    beside the traffic that is there

Ask with the numbers of requests and lengths of prompts that are to be planned for, of one model and fleet at a time."""

CONSOLE = """examples:
  headrace console                                beside a running `headrace up`, in its folder
  headrace console --nats nats://broker:4222 --frontend http://gateway:8000
  HEADRACE_CONSOLE_KEY=… headrace console --console-host 0.0.0.0

`headrace up` serves one already (--no-console: none). The link that is printed holds the admin key; without it the console only
shows, and where other machines reach it, or NATS asks for a login, it shows nothing."""

DOCTOR = """examples:
  headrace doctor                                 beside a running `headrace up`, in its folder
  headrace doctor --nats nats://broker:4222 --monitoring http://broker:8222
  headrace doctor --json --strict

exit codes: 0 nothing to mend, 1 an error (with --strict: or a warning), 69 no NATS server answers"""
