// The state of this tab: tables as the server sends them, changed once a second by what is different. Only their last state is
// kept, and a short history of the sums that the overview draws.
import { signal, batch, effect } from './vendor/signals-core.js';
import { useState, useEffect } from './vendor/htm-preact.js';

const KEY = 'headrace-console-key';
const HISTORY = 120; // points
export const access = signal({ version: '', admin: false, sees: true, kills: false, frontend: '' });
export const link = signal('connecting');
export const notice = signal(null);
export const history = signal([]);
const tables = new Map();
let watched = '';
let stop = null;

export function table(name) {
  if (!tables.has(name)) tables.set(name, signal({ rows: {}, trouble: '', loaded: false }));
  return tables.get(name);
}

export function useSignal(source) {
  const [, redraw] = useState(0);
  useEffect(() => effect(() => { source.value; redraw((n) => n + 1); }), [source]);
  return source.value;
}

export function useTable(name) { return useSignal(table(name)); }

export function key() { return sessionStorage.getItem(KEY) || ''; }
export function setKey(text) {
  if (text) sessionStorage.setItem(KEY, text); else sessionStorage.removeItem(KEY);
  return readAccess();
}
// The link that `headrace up` prints holds the key behind its #, which no server and no log sees. It goes from the address at once.
export function takeKeyFromAddress() {
  const found = /^#key=([\w-]+)/.exec(location.hash);
  if (found) { sessionStorage.setItem(KEY, found[1]); window.history.replaceState(null, '', location.pathname + '#/'); }
}

export function headers(more = {}) { const mine = key(); return mine ? { 'x-console-key': mine, ...more } : more; }

export async function call(path, options = {}) {
  const answer = await fetch('/console/api/' + path, { ...options, headers: headers(options.headers) });
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(body.error?.message || `the console answered with ${answer.status}`);
  return body;
}
export async function act(path) {
  try {
    notice.value = { kind: 'good', text: (await call(path, { method: 'POST' })).message };
  } catch (error) { notice.value = { kind: 'bad', text: error.message }; }
}
export async function readAccess() {
  try { access.value = await call('access'); } catch { /* the stream says that the console is gone */ }
  watch(watched.split(',').filter(Boolean), true);
}

// Watch these tables and no others.
export function watch(names, again = false) {
  const wanted = names.join(',');
  if (wanted === watched && stop && !again) return;
  watched = wanted;
  if (stop) stop.abort();
  stop = null;
  if (!wanted || document.hidden) return;
  stop = new AbortController();
  follow(wanted, stop.signal);
}
document.addEventListener('visibilitychange', () => {
  if (document.hidden) { if (stop) stop.abort(); stop = null; link.value = 'paused'; } else watch(watched.split(','), true);
});

async function follow(wanted, ended) {
  for (let wait = 500; !ended.aborted; wait = Math.min(wait * 2, 5000)) {
    try {
      const answer = await fetch('/console/events?tables=' + wanted, { headers: headers(), signal: ended });
      if (answer.status === 401) { link.value = 'needs the key'; return; }
      if (!answer.ok) throw new Error(String(answer.status));
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = '';
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        text += value;
        for (let end = text.indexOf('\n\n'); end >= 0; end = text.indexOf('\n\n')) {
          if (text.startsWith('data: ')) take(JSON.parse(text.slice(6, end)));
          text = text.slice(end + 2);
          link.value = 'live';
          wait = 500;
        }
      }
    } catch { /* said below */ }
    if (ended.aborted) return;
    link.value = 'no connection to the console';
    await new Promise((then) => setTimeout(then, wait));
  }
}

// A state that has not changed is not sent again, but it is a point of the history.
setInterval(() => {
  const now = table('summary').value.rows.deployment;
  if (now && link.value === 'live') history.value = [...history.value.slice(1 - HISTORY), { tokens: now.tokens_s, running: now.running, waiting: now.waiting }];
}, 1000);

export function take(update) {
  batch(() => {
    for (const [name, told] of Object.entries(update)) {
      if (name === 'troubles') continue;
      const one = table(name);
      const rows = told.all ? told.all : { ...one.value.rows };
      for (const [id, changed] of Object.entries(told.changes || {})) {
        if (changed === null) delete rows[id]; else rows[id] = { ...rows[id], ...changed };
      }
      one.value = { ...one.value, rows, loaded: true };
    }
    if (update.troubles) for (const [name, one] of tables) one.value = { ...one.value, trouble: update.troubles[name] || '' };
  });
}
