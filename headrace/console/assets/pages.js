// The pages that show a table or two of the deployment.
import { html } from './vendor/htm-preact.js';
import { access, history, useSignal, useTable } from './store.js';
import { Act, Card, Share, Spark, State, Table, Trouble, age, bytes, clock, count, listed, share, since } from './parts.js';

const CLASSES = { re: 'again', hi: 'high', std: 'standard', rb: 'batch again', batch: 'batch' };
const waiting = (classes) => Object.entries(classes || {}).map(([name, n]) => `${count(n)} ${CLASSES[name] || name}`).join(', ') || 'none';

const held = (r) => (r.since && !r.serving ? html` <span class="warn">held for ${since(r.since)}${r.waking.length ? `, ${r.waking.join(', ')} wakes` : ': no worker serves'}</span>` : '');
const fleets = (r) => Object.entries(r.fleets || {}).map(([name, [serving, all, running, slots, price]]) =>
  html`<div><code>${name || 'none'}</code> ${count(serving)} of ${count(all)} serving, ${count(running)} of ${count(slots)} slots${price ? `, price ${price}` : ''}</div>`);

export function Overview() {
  const summary = useTable('summary'), pools = useTable('pools'), past = useSignal(history);
  const now = summary.rows.deployment;
  const line = (name) => past.map((point) => point[name]);
  return html`<h1>Overview</h1><${Trouble} of=${summary} />
    ${!now ? html`<p>Reading the state of the deployment…</p>` : html`<dl class="cards">
      <${Card} title="Tokens per second">${count(Math.round(now.tokens_s))}<${Spark} values=${line('tokens')} label="tokens per second, the last two minutes" /><//>
      <${Card} title="Running">${count(now.running)} <span class="dim">of ${count(now.slots)}</span><${Spark} values=${line('running')} label="running requests, the last two minutes" /><//>
      <${Card} title="Waiting">${count(now.waiting)}<${Spark} values=${line('waiting')} label="waiting requests, the last two minutes" /><//>
      <${Card} title="Workers serving">${count(now.serving)} <span class="dim">of ${count(now.workers)}</span><//>
      <${Card} title="KV cache in use">${share(now.kv)}<//>
      <${Card} title="Routers">${count(now.routers)}<//>
      <${Card} title="Frontends">${count(now.frontends)}<//>
    </dl>
    ${now.starting?.length > 0 && html`<p class="note" role="status">Starting: ${now.starting.map(([name, at, doing]) => `${name} (for ${since(at)}${doing ? `: ${doing}` : ''})`).join(', ')}.</p>`}`}
    <h2>Pools</h2>
    <${Table} caption="Pools" rows=${listed(pools)} empty="No pool has a worker, a router or a stored request." columns=${[
      ['Model', (r) => r.model || html`<span class="bad">no worker</span>`, (r) => r.model],
      ['Pool', (r) => html`<code>${r.id}</code>`, (r) => r.id],
      ['Workers', (r) => `${count(r.serving)} of ${count(r.workers)}`, (r) => r.workers, { number: true }],
      ['Routers', (r) => count(r.routers), (r) => r.routers, { number: true }],
      ['Running', (r) => `${count(r.running)} of ${count(r.slots)}`, (r) => r.running, { number: true }],
      ...(listed(pools).some((r) => Object.keys(r.fleets || {}).length) ? [['Fleets', fleets, (r) => Object.keys(r.fleets || {}).join(), { wrap: true }]] : []),
      ['Waiting', (r) => html`${waiting(r.waiting)}${held(r)}`, (r) => Object.values(r.waiting || {}).reduce((a, b) => a + b, 0)],
      ['Tokens/s', (r) => count(Math.round(r.tokens_s)), (r) => r.tokens_s, { number: true }],
      ['KV cache', (r) => html`<${Share} value=${r.kv} label="KV cache in use" />`, (r) => r.kv],
    ]} />`;
}

const TIERS = ['device', 'host', 'disk'];

function cached(tiers) {
  if (!tiers || !tiers.length) return '–';
  const shown = tiers.map((blocks, at) => [TIERS[at], blocks]).filter(([, blocks], at) => !at || blocks);
  return shown.map(([name, blocks]) => `${count(blocks)} ${name}`).join(', ');
}

export function Workers() {
  const workers = useTable('workers'), may = useSignal(access);
  return html`<h1>Workers</h1><${Trouble} of=${workers} />
    <${Table} caption="Workers" rows=${listed(workers)} empty="No worker holds a lease." columns=${[
      ['Worker', (r) => html`<code>${r.id}</code>`, (r) => r.id],
      ['Model', (r) => r.model, (r) => r.model],
      ['Role', (r) => r.role, (r) => r.role],
      ...(listed(workers).some((r) => r.fleet) ? [['Fleet', (r) => r.fleet || '–', (r) => r.fleet]] : []),
      ['State', (r) => html`<${State} text=${r.state} />`, (r) => r.state],
      ['Running', (r) => `${count(r.running)} of ${count(r.slots)}`, (r) => r.running, { number: true }],
      ['In engine queue', (r) => count(r.queued), (r) => r.queued, { number: true }],
      ['KV blocks', (r) => html`<${Share} value=${r.kv} label=${`KV blocks of ${r.id} in use`} /> <span class="dim">of ${count(r.blocks)}</span>`, (r) => r.kv],
      ['Cached blocks', (r) => cached(r.tiers), (r) => (r.tiers || []).reduce((a, b) => a + b, 0)],
      ['Tokens/s', (r) => count(Math.round(r.tokens_s)), (r) => r.tokens_s, { number: true }],
      ['Step', (r) => (r.step_ms ? `${r.step_ms} ms` : '–'), (r) => r.step_ms, { number: true }],
      ['Engine', (r) => r.engine, (r) => r.engine],
      ['Host', (r) => `${r.host}${r.pid ? `, pid ${r.pid}` : ''}`, (r) => r.host],
      ['Up', (r) => since(r.started), (r) => r.started && -r.started, { number: true }],
      ...(may.admin ? [['Change', (r) => html`<${Act} path=${`workers/${r.id}/drain`} name="Drain" ask="Drain now?" />
        <${Act} path=${`workers/${r.id}/kill`} name="Kill" ask="Kill now?" danger allowed=${may.kills} />`, (r) => r.id]] : []),
    ]} />`;
}

export function Queues() {
  const queues = useTable('queues');
  return html`<h1>Queues</h1><${Trouble} of=${queues} />
    <p class="dim">Stored requests by pool, class and tenant, the longest first; of the twenty longest queues, how long the oldest one is there.
      A request that a router holds or a worker runs is stored until it ends.</p>
    <${Table} caption="Queues" rows=${listed(queues)} empty="Nothing waits." first=${5} down columns=${[
      ['Stream', (r) => r.stream, (r) => r.stream],
      ['Pool', (r) => html`<code>${r.pool}</code>`, (r) => r.pool],
      ['Class', (r) => CLASSES[r.class] || r.class || '–', (r) => r.class],
      ['Tenant', (r) => (r.tenant === '_' ? html`<span class="dim">none</span>` : r.tenant || '–'), (r) => r.tenant],
      ['Worker', (r) => r.worker || '–', (r) => r.worker],
      ['Requests', (r) => count(r.waiting), (r) => r.waiting, { number: true }],
      ['Oldest', (r) => (r.oldest ? since(r.oldest) : '–'), (r) => r.oldest && -r.oldest, { number: true }],
    ]} />`;
}

export function Streams() {
  const streams = useTable('streams'), rows = listed(streams);
  const readers = rows.flatMap((r) => (r.readers || []).map(([name, lag, hand, again, pulls]) => ({ id: `${r.id} ${name}`, stream: r.id, name, lag, hand, again, pulls })));
  return html`<h1>Streams</h1><${Trouble} of=${streams} />
    <${Table} caption="Streams" rows=${rows} empty="Reading…" columns=${[
      ['Stream', (r) => html`<code title=${r.about}>${r.id}</code>`, (r) => r.id],
      ['Messages', (r) => (r.exists ? count(r.messages) : html`<span class="bad">missing</span>`), (r) => r.messages, { number: true }],
      ['Size', (r) => bytes(r.bytes), (r) => r.bytes, { number: true }],
      ['Subjects', (r) => count(r.subjects), (r) => r.subjects, { number: true }],
      ['Oldest', (r) => age(r.oldest_s), (r) => r.oldest_s, { number: true }],
      ['Consumers', (r) => count(r.consumers), (r) => r.consumers, { number: true }],
      ['Not delivered', (r) => count(r.lag), (r) => r.lag, { number: true }],
      ['Not acknowledged', (r) => count(r.in_hand), (r) => r.in_hand, { number: true }],
      ['Redelivered', (r) => count(r.redelivered), (r) => r.redelivered, { number: true }],
    ]} />
    <h2>Consumers</h2>
    <${Table} caption="Consumers" rows=${readers} empty="No stream has a consumer." first=${2} down columns=${[
      ['Stream', (r) => html`<code>${r.stream}</code>`, (r) => r.stream],
      ['Consumer', (r) => html`<code>${r.name}</code>`, (r) => r.name],
      ['Not delivered', (r) => count(r.lag), (r) => r.lag, { number: true }],
      ['Not acknowledged', (r) => count(r.hand), (r) => r.hand, { number: true }],
      ['Redelivered', (r) => count(r.again), (r) => r.again, { number: true }],
      ['Open pulls', (r) => count(r.pulls), (r) => r.pulls, { number: true }],
    ]} />`;
}

export function Routers() {
  const routers = useTable('routers');
  return html`<h1>Routers</h1><${Trouble} of=${routers} />
    <${Table} caption="Routers" rows=${listed(routers)} empty="No router runs: workers place requests on themselves." columns=${[
      ['Router', (r) => html`<code>${r.router}</code>`, (r) => r.router],
      ['Pool', (r) => html`<code>${r.pool}</code>`, (r) => r.pool],
      ['State', (r) => html`<${State} text=${r.state} />`, (r) => r.state],
      ['Waiting', (r) => count(r.waiting), (r) => r.waiting, { number: true }],
      ['Placing', (r) => count(r.placing), (r) => r.placing, { number: true }],
      ['Refusing', (r) => count(r.refusing), (r) => r.refusing, { number: true }],
      ['Host', (r) => `${r.host}${r.pid ? `, pid ${r.pid}` : ''}`, (r) => r.host],
      ['Up', (r) => since(r.started), (r) => r.started && -r.started, { number: true }],
    ]} />
    <p class="dim">Why a request is where it is stands in its story: <a href="#/requests">requests</a>.</p>`;
}

export function Prefixes() {
  const prefixes = useTable('prefixes'), rows = listed(prefixes);
  const workers = [...new Set(rows.flatMap((r) => Object.keys(r.workers)))].sort().slice(0, 24);
  const cell = (r, worker) => {
    const seen = r.workers[worker];
    return seen ? html`<${Share} good value=${seen[1] ? seen[2] / seen[1] : 0} label=${`of ${seen[1]} tokens sent to ${worker}, cached`} /> <span class="dim">${count(seen[0])}</span>` : '';
  };
  return html`<h1>Prefix cache</h1><${Trouble} of=${prefixes} />
    <p class="dim">Prefixes of the last 300 placements, named by their first block. For each worker that was sent some of them: the share of prompt
      tokens that the router found cached there, and the number of requests.</p>
    <${Table} caption="Prefixes" rows=${rows} empty="No placement of a prompt of at least one block is on record." first=${1} down columns=${[
      ['First block', (r) => html`<code>${r.id.slice(0, 8)}</code>`, (r) => r.id],
      ['Tokens', (r) => count(r.tokens), (r) => r.tokens, { number: true }],
      ['Cached', (r) => share(r.tokens ? r.cached / r.tokens : 0), (r) => (r.tokens ? r.cached / r.tokens : 0), { number: true }],
      ...workers.map((worker) => [worker, (r) => cell(r, worker), (r) => (r.workers[worker] || [0, 0])[1]]),
    ]} />`;
}

export function Letters() {
  const letters = useTable('letters'), may = useSignal(access);
  return html`<h1>Dead letters</h1><${Trouble} of=${letters} />
    <p class="dim">The last 200 requests that were taken out of service. One that crashed its workers may crash as many more when it runs again.
      ${may.admin ? '' : ' Running one again or dropping it needs the admin key.'}</p>
    <${Table} caption="Dead letters" rows=${listed(letters)} empty="There are no dead letters." first=${0} down columns=${[
      ['Number', (r) => r.number, (r) => r.number, { number: true }],
      ['Since', (r) => clock(r.at), (r) => r.at],
      ['Reason', (r) => html`<span class="bad">${r.reason}</span>`, (r) => r.reason],
      ['Request', (r) => (r.request ? html`<a href=${`#/requests/${r.request}`}><code>${r.request}</code></a>` : '–'), (r) => r.request],
      ['Model', (r) => r.model || r.stream || '–', (r) => r.model],
      ['Tenant', (r) => r.tenant || '–', (r) => r.tenant],
      ['Attempt', (r) => r.attempt ?? '–', (r) => r.attempt, { number: true }],
      ['What happened', (r) => r.trouble || r.said || (r.history || []).map((h) => h.worker).join(', ') || '–', (r) => r.trouble, { wrap: true }],
      ...(may.admin ? [['Change', (r) => html`<${Act} path=${`letters/${r.number}/retry`} name="Run again" ask="Run it now?" allowed=${!!r.request} />
        <${Act} path=${`letters/${r.number}/drop`} name="Drop" ask="Drop it for good?" danger />`, (r) => r.number]] : []),
    ]} />`;
}

export function Batches() {
  const batches = useTable('batches');
  const done = (r) => (r.total ? (r.completed + r.failed) / r.total : null);
  return html`<h1>Batches</h1><${Trouble} of=${batches} />
    <${Table} caption="Batches" rows=${listed(batches)} empty="There are no batches." first=${6} down columns=${[
      ['Batch', (r) => html`<code>${r.id}</code>`, (r) => r.id],
      ['Status', (r) => html`<${State} text=${r.status} />`, (r) => r.status],
      ['Progress', (r) => html`<${Share} good value=${done(r)} label=${`progress of ${r.id}`} /> <span class="dim">${count(r.completed + r.failed)} of ${count(r.total)}</span>`, done],
      ['Failed', (r) => (r.failed ? html`<span class="bad">${count(r.failed)}</span>` : '0'), (r) => r.failed, { number: true }],
      ['Model', (r) => r.model, (r) => r.model],
      ['Tenant', (r) => (r.tenant === '_' ? html`<span class="dim">none</span>` : r.tenant), (r) => r.tenant],
      ['Age', (r) => since(r.created), (r) => r.created && -r.created, { number: true }],
      ['Endpoint', (r) => r.endpoint, (r) => r.endpoint],
      ['Error', (r) => r.error || '–', (r) => r.error, { wrap: true }],
    ]} />`;
}

export function Models() {
  const models = useTable('models'), pools = useTable('pools');
  return html`<h1>Models</h1><${Trouble} of=${models} />
    <${Table} caption="Models" rows=${listed(models)} empty="No model is or was served." columns=${[
      ['Model', (r) => r.model, (r) => r.model],
      ['Workers', (r) => count(pools.rows[r.id]?.workers ?? 0), (r) => pools.rows[r.id]?.workers ?? 0, { number: true }],
      ['Kinds', (r) => r.kinds.join(', '), (r) => r.kinds.join()],
      ['Context', (r) => count(r.context), (r) => r.context, { number: true }],
      ['Block', (r) => count(r.block), (r) => r.block, { number: true }],
      ['Tools', (r) => r.tools || '–', (r) => r.tools],
      ['Reasoning', (r) => r.reasoning || '–', (r) => r.reasoning],
      ['Media', (r) => r.media.join(', ') || '–', (r) => r.media.join()],
      ['Other names', (r) => r.aliases.join(', ') || '–', (r) => r.aliases.join(), { wrap: true }],
      ['Adapters', (r) => r.adapters.join(', ') || '–', (r) => r.adapters.length, { wrap: true }],
      ['Namespace', (r) => r.namespace, (r) => r.namespace],
    ]} />`;
}
