// What pages are made of: tables that sort, filter and page, figures, sparklines, buttons that ask twice.
import { html, useState } from './vendor/htm-preact.js';
import { access, act, useSignal } from './store.js';

export const PAGE = 100; // rows shown at once: a thousand workers must not make a thousand rows of elements

export const count = (n) => (n == null ? '–' : Number(n).toLocaleString('en'));
export const share = (x) => (x == null ? '–' : `${Math.round(x * 100)} %`);
export const bytes = (n) => {
  if (n == null) return '–';
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let at = 0;
  while (n >= 1024 && at < 4) { n /= 1024; at += 1; }
  return `${at ? n.toFixed(1) : n} ${units[at]}`;
};
export const age = (s) => {
  if (s == null) return '–';
  for (const [unit, length] of [['d', 86400], ['h', 3600], ['min', 60]]) if (s >= 2 * length) return `${Math.round(s / length)} ${unit}`;
  return `${Math.max(0, Math.round(s))} s`;
};
export const since = (unix) => (unix ? age(Date.now() / 1000 - unix) : '–');
export const seconds = (s) => (s == null ? '–' : s < 1 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(2)} s`);
export const clock = (unix) => (unix ? new Date(unix * 1000).toLocaleTimeString('en-GB') : '–');
const TONES = { serving: 'good', completed: 'good', draining: 'warn', paused: 'warn', asleep: 'warn', waking: 'warn', failed: 'bad', expired: 'bad', 'no report': 'bad', 'no answer': 'bad', 'lease lost': 'bad' };
export const State = ({ text }) => html`<span class=${TONES[text] || ''}>${text}</span>`;

export const Share = ({ value, label, good }) =>
  value == null ? '–' : html`<meter min="0" max="1" high=${good ? 1 : 0.9} value=${value} aria-label=${label}></meter> ${share(value)}`;

export function Spark({ values, label }) {
  const top = Math.max(...values, 1e-9), width = 140, height = 26;
  const path = values.map((v, i) => `${i ? 'L' : 'M'}${((i / Math.max(1, values.length - 1)) * width).toFixed(1)} ${(height - 2 - (v / top) * (height - 4)).toFixed(1)}`).join('');
  return html`<svg class="spark" width=${width} height=${height} role="img" aria-label=${label}><path d=${path} /></svg>`;
}

export const Card = ({ title, children }) => html`<div class="card"><dt>${title}</dt><dd>${children}</dd></div>`;

export function Trouble({ of }) {
  return of.trouble ? html`<p class="note bad" role="status">Not current: ${of.trouble}</p>` : null;
}

// columns: [title, row => text or element, row => sort value, { number, wrap }]
export function Table({ caption, columns, rows, empty, first = 0, down = false, filter = true }) {
  const [order, setOrder] = useState({ at: first, down });
  const [wanted, setWanted] = useState('');
  const [page, setPage] = useState(0);
  const words = wanted.trim().toLowerCase();
  let shown = words ? rows.filter((row) => JSON.stringify(row).toLowerCase().includes(words)) : rows.slice();
  const value = columns[order.at][2];
  shown.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    const less = x == null ? -1 : y == null ? 1 : x < y ? -1 : x > y ? 1 : 0;
    return (order.down ? -less : less) || (a.id < b.id ? -1 : 1);
  });
  const pages = Math.max(1, Math.ceil(shown.length / PAGE)), at = Math.min(page, pages - 1);
  const part = shown.slice(at * PAGE, (at + 1) * PAGE);
  return html`
    ${filter && rows.length > 8 && html`<div class="line"><label>Filter ${caption.toLowerCase()}<input type="search" value=${wanted} onInput=${(e) => { setWanted(e.target.value); setPage(0); }} /></label>
      <span class="dim" role="status">${count(shown.length)} of ${count(rows.length)}</span></div>`}
    ${rows.length === 0 ? html`<p class="dim">${empty}</p>` : html`<div class="table" role="region" aria-label=${caption} tabindex="0"><table>
      <thead><tr>${columns.map(([title, , , kind], i) => html`<th scope="col" class=${kind?.number ? 'number' : ''} aria-sort=${order.at === i ? (order.down ? 'descending' : 'ascending') : 'none'}>
        <button type="button" onClick=${() => setOrder({ at: i, down: order.at === i ? !order.down : !!kind?.number })}>${title}${order.at === i ? (order.down ? ' ▾' : ' ▴') : ''}</button></th>`)}</tr></thead>
      <tbody>${part.map((row) => html`<tr key=${row.id}>${columns.map(([, draw, , kind]) => html`<td class=${kind?.number ? 'number' : kind?.wrap ? 'wrap' : ''}>${draw(row)}</td>`)}</tr>`)}</tbody></table></div>`}
    ${pages > 1 && html`<div class="line"><button type="button" disabled=${at === 0} onClick=${() => setPage(at - 1)}>Earlier</button>
      <span>Page ${at + 1} of ${pages}</span><button type="button" disabled=${at + 1 >= pages} onClick=${() => setPage(at + 1)}>Later</button></div>`}`;
}
export const listed = (table) => Object.entries(table.rows).map(([id, row]) => ({ id, ...row }));

// A button that changes something: there only with the admin key, and asks once more.
export function Act({ path, name, ask, danger, allowed = true }) {
  const [armed, setArmed] = useState(false);
  const [busy, setBusy] = useState(false);
  if (!useSignal(access).admin || !allowed) return null;
  const go = async () => {
    if (!armed) { setArmed(true); setTimeout(() => setArmed(false), 4000); return; }
    setArmed(false); setBusy(true);
    await act(path);
    setBusy(false);
  };
  return html`<button type="button" class=${danger || armed ? 'danger' : ''} disabled=${busy} onClick=${go}>${busy ? `${name} …` : armed ? ask : name}</button> `;
}
