// The last placements, and the story of one request with its timeline and the reasons of its placements.
import { html, useEffect, useState } from './vendor/htm-preact.js';
import { call } from './store.js';
import { Table, clock, count, seconds } from './parts.js';

export function Requests({ id }) {
  return html`<h1>Requests</h1><${Search} id=${id} />${id ? html`<${Story} id=${id} key=${id} />` : html`<${Placements} />`}`;
}

function Search({ id }) {
  const [wanted, setWanted] = useState(id || '');
  useEffect(() => setWanted(id || ''), [id]);
  const go = (event) => { event.preventDefault(); if (wanted.trim()) location.hash = `#/requests/${encodeURIComponent(wanted.trim())}`; };
  return html`<form class="line" onSubmit=${go}><label>Id of a request, of its answer, or the client's own<input type="search" size="40" value=${wanted} onInput=${(e) => setWanted(e.target.value)} /></label>
    <button type="submit">Tell its story</button>${id && html`<a href="#/requests">All requests</a>`}</form>`;
}

function Placements() {
  const [shown, setShown] = useState(null);
  const [trouble, setTrouble] = useState('');
  const load = async (before) => {
    try {
      const page = await call('requests' + (before ? `?before=${before}` : ''));
      setShown({ ...page, first: !before });
      setTrouble('');
    } catch (error) { setTrouble(error.message); }
  };
  useEffect(() => { load(); }, []);
  if (trouble) return html`<p class="note bad" role="alert">${trouble}</p>`;
  if (!shown) return html`<p>Reading…</p>`;
  const rows = shown.placements.map((one) => ({ ...one, id: String(one.number), request: one.id }));
  return html`<p class="dim">Placements by the routers, the newest first, two days back. A request that moved has several.</p>
    <${Table} caption="Placements" rows=${rows} empty="No placement is on record: no router placed a request in the last two days." first=${0} down filter=${false} columns=${[
      ['Placed', (r) => clock(r.at), (r) => r.number],
      ['Request', (r) => html`<a href=${`#/requests/${r.request}`}><code>${r.request}</code></a>`, (r) => r.request],
      ['Attempt', (r) => r.attempt, (r) => r.attempt, { number: true }],
      ['Worker', (r) => html`<code>${r.worker}</code>`, (r) => r.worker],
      ['Why', (r) => r.reason || '–', (r) => r.reason],
      ['Waited', (r) => seconds(r.waited_s), (r) => r.waited_s, { number: true }],
      ['Prompt', (r) => count(r.tokens), (r) => r.tokens, { number: true }],
      ['Cached', (r) => count(Math.max(0, r.tokens - r.uncached)), (r) => r.tokens - r.uncached, { number: true }],
      ...(rows.some((r) => r.fleet) ? [['Fleet', (r) => (r.fleet ? `${r.fleet} (${r.fleet_reason})` : '–'), (r) => r.fleet]] : []),
      ['Foreseen TTFT', (r) => seconds(r.predicted_ttft_s), (r) => r.predicted_ttft_s, { number: true }],
      ...(rows.some((r) => r.ttft_target_s != null) ? [['Target', (r) => seconds(r.ttft_target_s), (r) => r.ttft_target_s, { number: true }]] : []),
      ['Class', (r) => r.request_class, (r) => r.request_class],
      ['Tenant', (r) => (r.tenant === '_' ? '–' : r.tenant), (r) => r.tenant],
    ]} />
    <div class="line"><button type="button" onClick=${() => load()}>${shown.first ? 'Read again' : 'Newest'}</button>
      <button type="button" disabled=${!shown.before} onClick=${() => load(shown.before)}>Older</button></div>`;
}

export function Story({ id }) {
  const [told, setTold] = useState(null);
  const [trouble, setTrouble] = useState('');
  useEffect(() => {
    let gone = false, timer = 0;
    const load = async () => {
      try {
        const found = await call('requests/' + encodeURIComponent(id));
        if (gone) return;
        setTold(found); setTrouble('');
        if (found.stories.some((story) => story.ended_s == null) && !document.hidden) timer = setTimeout(load, 1000);
      } catch (error) { if (!gone) setTrouble(error.message); }
    };
    load();
    return () => { gone = true; clearTimeout(timer); };
  }, [id]);
  if (trouble) return html`<p class="note bad" role="alert">${trouble}</p>`;
  if (!told) return html`<p>Asking frontends and routers…</p>`;
  return html`${told.silent > 0 && html`<p class="note">${told.silent} frontends did not answer; what they remember is missing.</p>`}
    ${told.stories.map((story) => html`<${One} story=${story} key=${story.id} />`)}
    ${told.stories.length === 0 && html`<p>No frontend remembers it. Its placements were stored:</p><ul>${told.recorded.map((one) =>
      html`<li>${new Date(one.at * 1000).toLocaleString('en-GB')}: attempt ${one.attempt} on <code>${one.worker}</code>, ${count(one.tokens)} prompt tokens, waited ${seconds(one.waited_s)}</li>`)}</ul>`}
    ${told.decided.map((one) => html`<${Decision} one=${one} />`)}`;
}

const NAMES = { queue: 'waiting', prefill: 'prefill', transfer: 'transfer', decode: 'decode', move: 'moving' };

export function Timeline({ stages }) {
  const total = stages.length ? stages[stages.length - 1].end_s : 0;
  if (!(total > 0)) return null;
  const sums = {};
  for (const part of stages) sums[part.name] = (sums[part.name] || 0) + part.end_s - part.begin_s;
  const words = stages.map((part) => `${NAMES[part.name]} ${seconds(part.end_s - part.begin_s)}${part.worker ? ` on ${part.worker}` : ''}`).join(', then ');
  return html`<div class="timeline"><svg viewBox="0 0 1000 24" preserveAspectRatio="none" role="img" aria-label=${words}>
      ${stages.map((part) => html`<rect class=${part.name} x=${(part.begin_s / total) * 1000} y="0" height="24" width=${Math.max(1.5, ((part.end_s - part.begin_s) / total) * 1000)}><title>${NAMES[part.name]} ${seconds(part.end_s - part.begin_s)} ${part.worker}</title></rect>`)}
    </svg></div>
    <ul class="legend">${Object.entries(sums).map(([name, s]) => html`<li><span class=${`swatch ${name}`}></span>${NAMES[name]} ${seconds(s)}</li>`)}</ul>`;
}

const EVENTS = {
  placed: (e) => html`placed on <code>${e.worker}</code>${e.by ? html` by <code>${e.by}</code>` : ''}`,
  started: (e) => html`attempt ${e.attempt} started on <code>${e.worker}</code>`,
  prefilled: (e) => html`first token from <code>${e.worker}</code>: ${count(e.tokens)} prompt tokens, ${count(e.uncached)} of them computed${e.prefill ? html` by <code>${e.prefill}</code>` : ''}`,
  moved: (e) => html`<strong>moved</strong> away from <code>${e.worker}</code>`,
};

function One({ story }) {
  const end = story.ended_s == null ? html`<span class="warn">runs since ${new Date(story.submitted * 1000).toLocaleTimeString('en-GB')}</span>`
    : story.fault ? html`<span class="bad">failed after ${seconds(story.ended_s)}: ${story.fault}</span>` : html`<span class="good">ended after ${seconds(story.ended_s)} (${(story.finish || []).join(', ')})</span>`;
  return html`<h2><code>${story.id}</code></h2>
    <p>${end}. Model ${story.model}, ${count(story.prompt_tokens)} prompt tokens, ${count(story.answer_tokens || 0)} answered, class ${story.request_class}, tenant ${story.tenant === '_' ? 'none' : story.tenant}, frontend <code>${story.ingress}</code>.</p>
    ${story.message && html`<p class="note bad">${story.message}</p>`}
    <${Timeline} stages=${story.stages} />
    <table><caption>What happened</caption><thead><tr><th scope="col" class="number">After</th><th scope="col">Event</th></tr></thead><tbody>
      <tr><td class="number">0 ms</td><td>stored</td></tr>
      ${[...story.events].sort((a, b) => a.after_s - b.after_s).map((event) => html`<tr><td class="number">${seconds(event.after_s)}</td><td>${(EVENTS[event.kind] || ((e) => html`${e.kind} <code>${e.worker}</code>`))(event)}</td></tr>`)}
      ${story.ended_s != null && html`<tr><td class="number">${seconds(story.ended_s)}</td><td><strong>${story.fault || 'answered'}</strong></td></tr>`}
    </tbody></table>`;
}

function Decision({ one }) {
  const rows = (one.candidates || []).map((each) => ({ id: each.worker, ...each }));
  return html`<h2>Why ${one.worker ? html`<code>${one.worker}</code>` : `it is ${one.state}`} <span class="dim">attempt ${one.attempt || 1}, router ${one.router}, policy ${one.policy}</span></h2>
    <p>${one.reason || one.state}; waited ${seconds(one.waited_s || 0)} in the router, first token foreseen after ${seconds(one.predicted_ttft_s || 0)}.</p>
    ${one.fleet && html`<${Fleets} of=${one.fleet} /><p>The workers:</p>`}
    <${Table} caption="Candidates" rows=${rows} empty="The router kept no candidates." first=${5} filter=${false} columns=${[
      ['Worker', (r) => html`<code>${r.id}</code>${r.id === one.worker ? ' ← chosen' : ''}`, (r) => r.id],
      ['Cached blocks on device', (r) => count(r.device || 0), (r) => r.device || 0, { number: true }],
      ['host', (r) => count(r.host || 0), (r) => r.host || 0, { number: true }],
      ['disk', (r) => count(r.disk || 0), (r) => r.disk || 0, { number: true }],
      ['To compute', (r) => count(r.uncached || 0), (r) => r.uncached || 0, { number: true }],
      ['Cost', (r) => seconds(r.cost_s || 0), (r) => r.cost_s || 0, { number: true }],
      ['Wait', (r) => seconds(r.wait_s || 0), (r) => r.wait_s || 0, { number: true }],
      ['Running', (r) => count(r.running || 0), (r) => r.running || 0, { number: true }],
      ['Why not', (r) => r.why_not || (r.room === false ? 'no room' : '–'), (r) => r.why_not || '', { wrap: true }],
    ]} />`;
}

const predicted = (s) => (s < 0 ? 'unknown' : seconds(s || 0));

function Fleets({ of }) {
  const rows = (of.options || []).map((each) => ({ id: each.fleet || 'none', ...each }));
  return html`<p>Fleet <code>${of.fleet}</code>, reason ${of.reason}; asked for: first token within ${seconds(of.ttft_target_s || 0)}, each next one within ${seconds(of.itl_target_s || 0)}.</p>
    <${Table} caption="Fleets" rows=${rows} empty="The router kept no fleets." first=${0} filter=${false} columns=${[
      ['Preferred', (r) => (r.rank || 0) + 1, (r) => r.rank || 0, { number: true }],
      ['Fleet', (r) => html`<code>${r.id}</code>${r.id === of.fleet ? ' ← chosen' : ''}`, (r) => r.id],
      ['Targets', (r) => html`<span class=${r.state === 'late' ? 'bad' : ''}>${{ meets: 'met', late: 'missed' }[r.state] || 'unknown'}</span>`, (r) => r.state],
      ['Predicted first token', (r) => predicted(r.ttft_s), (r) => r.ttft_s, { number: true }],
      ['Predicted next token', (r) => predicted(r.itl_s), (r) => r.itl_s, { number: true }],
      ['Late by', (r) => seconds(r.late_s || 0), (r) => r.late_s || 0, { number: true }],
      ['Price', (r) => r.price || '–', (r) => r.price || 0, { number: true }],
    ]} />`;
}
