// A chat with a served model: the answer as it streams, where it runs, how fast, and what becomes of it when its worker is killed.
import { html, useEffect, useRef, useState } from './vendor/htm-preact.js';
import { access, act, call, headers, useSignal } from './store.js';
import { count, seconds } from './parts.js';
import { Timeline } from './requests.js';

const TOOL = { type: 'function', function: { name: 'get_weather', description: 'Tells the weather of a city.', parameters: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] } } };
const MOST = 200000; // characters of an answer that are shown
const LOOK_MS = 700;

export function Playground() {
  const may = useSignal(access);
  const [models, setModels] = useState([]);
  const [form, setForm] = useState({ model: '', system: '', text: 'Tell me about rivers.', tokens: 400, temperature: '', tools: false, image: '', key: '' });
  const [run, setRun] = useState(null);
  const [turns, setTurns] = useState([]);
  const stop = useRef(null);
  const live = useRef(null); // the answer that is being read
  const set = (name) => (event) => setForm({ ...form, [name]: event.target.type === 'checkbox' ? event.target.checked : event.target.value });
  const auth = () => (form.key ? { authorization: `Bearer ${form.key}` } : {});
  const [trouble, setTrouble] = useState('');
  const listModels = async () => {
    try {
      const found = (await call('chat/models', { headers: auth() })).data.map((one) => one.id);
      setModels(found); setTrouble('');
      setForm((now) => ({ ...now, model: now.model || found[0] || '' }));
    } catch (error) { setTrouble(error.message); }
  };
  useEffect(() => { listModels(); return () => stop.current?.abort(); }, []);

  const send = async (event) => {
    event.preventDefault();
    const content = form.image ? [{ type: 'text', text: form.text }, { type: 'image_url', image_url: { url: form.image } }] : form.text;
    const asked = [...turns, { role: 'user', content }];
    const messages = form.system ? [{ role: 'system', content: form.system }, ...asked] : asked;
    const body = { model: form.model, messages, stream: true, stream_options: { include_usage: true }, max_tokens: Number(form.tokens) || 400 };
    if (form.temperature !== '') body.temperature = Number(form.temperature);
    if (form.tools) body.tools = [TOOL];
    stop.current = new AbortController();
    const now = { id: '', worker: '', text: '', thought: '', calls: [], pieces: 0, begun: performance.now(), first: 0, last: 0, usage: null, end: '', error: '', stages: [], workers: [], killed: '' };
    live.current = now;
    const show = () => setRun({ ...now });
    show();
    const watcher = setInterval(() => look(now, show), LOOK_MS);
    try {
      const answer = await fetch('/console/api/chat', { method: 'POST', body: JSON.stringify(body), signal: stop.current.signal, headers: headers({ 'content-type': 'application/json', ...auth() }) });
      if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error?.message || `answered with ${answer.status}`);
      try { now.worker = JSON.parse(answer.headers.get('x-headrace-decision') || '{}').worker || ''; } catch { /* no decision was told */ }
      await read(answer.body, now, show);
      if (!now.end) throw new Error('the stream ended before its last event');
      setTurns([...asked, { role: 'assistant', content: now.text }]);
    } catch (error) { now.error = error.name === 'AbortError' ? 'stopped' : error.message; }
    clearInterval(watcher);
    stop.current = null;
    await look(now, show);
    now.done = true;
    show();
  };

  const on = workerOf(run);
  const busy = run && !run.done;
  return html`<h1>Playground</h1>
    ${!may.frontend && html`<p class="note">This console knows no frontend: start it with <code>--frontend URL</code>.</p>`}
    ${trouble && html`<p class="note bad" role="alert">${trouble}</p>`}
    <form onSubmit=${send}>
      <div class="line">
        <label>Model<select value=${form.model} onChange=${set('model')}>${models.map((name) => html`<option value=${name}>${name}</option>`)}</select></label>
        <label>Most tokens<input type="number" min="1" value=${form.tokens} onInput=${set('tokens')} /></label>
        <label>Temperature<input type="number" min="0" max="2" step="0.1" placeholder="model's own" value=${form.temperature} onInput=${set('temperature')} /></label>
        <label>System prompt<input size="28" value=${form.system} onInput=${set('system')} /></label>
        <label>API key of the frontend<input type="password" autocomplete="off" placeholder="if it asks for one" value=${form.key} onInput=${set('key')} onChange=${listModels} /></label>
        <label>Image<input type="file" accept="image/*" onChange=${(e) => image(e.target.files[0], (url) => setForm({ ...form, image: url }))} /></label>
        <label class="box"><input type="checkbox" checked=${form.tools} onChange=${set('tools')} /><span>Offer the tool get_weather</span></label>
      </div>
      <label class="dim" for="question">Message${turns.length ? `, after ${turns.length} others` : ''}</label><br />
      <textarea id="question" value=${form.text} onInput=${set('text')}></textarea>
      <div class="line">
        <button type="submit" disabled=${busy || !form.model}>Send</button>
        <button type="button" disabled=${!busy} onClick=${() => stop.current?.abort()}>Stop</button>
        <button type="button" disabled=${busy || !turns.length} onClick=${() => { setTurns([]); setRun(null); }}>New conversation</button>
        ${may.kills && html`<button type="button" class="danger" disabled=${!busy || !on} onClick=${() => { live.current.killed = on; act(`workers/${on}/kill`); }}>Kill the worker now</button>`}
      </div>
    </form>
    ${run && html`<${Answer} run=${run} on=${on} />`}`;
}

const workerOf = (run) => (run ? run.workers[run.workers.length - 1] || run.worker : '');

async function look(run, show) {
  if (!run.id) return;
  try {
    const story = (await call('requests/' + encodeURIComponent(run.id))).stories.at(-1);
    if (!story) return;
    run.stages = story.stages;
    run.workers = [...new Set(story.events.filter((e) => e.kind === 'started').map((e) => e.worker))];
    run.moves = story.events.filter((e) => e.kind === 'moved').length;
    show();
  } catch { /* the next look may find it */ }
}

async function read(body, run, show) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = '', drawn = 0;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    for (let end = text.indexOf('\n\n'); end >= 0; end = text.indexOf('\n\n')) {
      const data = text.slice(0, end).split('\n').filter((line) => line.startsWith('data: ')).map((line) => line.slice(6)).join('');
      text = text.slice(end + 2);
      if (data && data !== '[DONE]') take(JSON.parse(data), run);
    }
    if (performance.now() - drawn > 50) { drawn = performance.now(); show(); }
  }
}

function take(event, run) {
  if (event.error) throw new Error(event.error.message);
  run.id = event.id || run.id;
  if (event.usage) run.usage = event.usage;
  for (const choice of event.choices || []) {
    const { content, reasoning_content: thought, reasoning, tool_calls: calls } = choice.delta || {};
    if (content || thought || reasoning || calls) {
      const at = performance.now();
      run.first ||= at;
      run.last = at;
      run.pieces += 1;
    }
    if (content && run.text.length < MOST) run.text += content;
    if (thought || reasoning) run.thought += thought || reasoning;
    for (const one of calls || []) {
      const known = (run.calls[one.index] ||= { name: '', arguments: '' });
      known.name += one.function?.name || '';
      known.arguments += one.function?.arguments || '';
    }
    if (choice.finish_reason) run.end = choice.finish_reason;
  }
}

function image(file, done) {
  if (!file) { done(''); return; }
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.readAsDataURL(file);
}

function Answer({ run, on }) {
  const used = run.usage, spent = (run.last - run.first) / 1000;
  const rate = used && spent > 0 ? (used.completion_tokens - 1) / spent : 0;
  const cached = used?.prompt_tokens_details?.cached_tokens;
  return html`<h2>Answer</h2>
    <dl class="cards">
      <div class="card"><dt>First token after</dt><dd>${run.first ? seconds((run.first - run.begun) / 1000) : '…'}</dd></div>
      <div class="card"><dt>Tokens per second</dt><dd>${rate ? count(Math.round(rate)) : '…'}</dd></div>
      <div class="card"><dt>Worker</dt><dd><code>${on || '…'}</code></dd></div>
      <div class="card"><dt>Prompt tokens cached</dt><dd>${used ? `${count(cached || 0)} of ${count(used.prompt_tokens)}` : '…'}</dd></div>
      <div class="card"><dt>Moves</dt><dd>${run.moves || 0}</dd></div>
    </dl>
    ${run.killed && html`<p class="note">${run.killed} was killed${run.workers.length > 1 ? html`; <code>${on}</code> goes on with the next token` : ''}.</p>`}
    ${run.thought && html`<details open><summary>Reasoning</summary><div class="answer dim">${run.thought}</div></details>`}
    <div class="answer" aria-live="off" id="answer">${run.text}</div>
    ${run.calls.map((one) => html`<pre>${one.name}(${one.arguments})</pre>`)}
    <p role="status">${run.error ? html`<span class="bad">${run.error}</span>` : run.done ? html`<span class="good">ended: ${run.end}</span>` : 'streaming…'}
      ${run.id && html` <a href=${`#/requests/${run.id}`}>The story of this request</a>`}</p>
    <${Timeline} stages=${run.stages} />`;
}
