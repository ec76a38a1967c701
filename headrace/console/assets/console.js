// The frame: navigation by the part of the address behind #, the state of the connection, the admin key.
import { html, render, useEffect, useState } from './vendor/htm-preact.js';
import { access, key, link, notice, readAccess, setKey, takeKeyFromAddress, useSignal, watch } from './store.js';
import { Batches, Letters, Models, Overview, Prefixes, Queues, Routers, Streams, Workers } from './pages.js';
import { Requests } from './requests.js';
import { Playground } from './playground.js';

// path → [title, page, the tables that it shows]
const PAGES = {
  '': ['Overview', Overview, ['summary', 'pools']],
  workers: ['Workers', Workers, ['workers']],
  requests: ['Requests', Requests, []],
  queues: ['Queues', Queues, ['queues']],
  routers: ['Routers', Routers, ['routers']],
  cache: ['Prefix cache', Prefixes, ['prefixes']],
  streams: ['Streams', Streams, ['streams']],
  letters: ['Dead letters', Letters, ['letters']],
  batches: ['Batches', Batches, ['batches']],
  models: ['Models', Models, ['models', 'pools']],
  playground: ['Playground', Playground, []],
};

const place = () => {
  const [path, ...rest] = location.hash.replace(/^#\/?/, '').split('/');
  return { path: PAGES[path] ? path : '', id: rest.length ? decodeURIComponent(rest.join('/')) : '' };
};

function App() {
  const [at, setAt] = useState(place());
  const may = useSignal(access), said = useSignal(notice), state = useSignal(link);
  const [asking, setAsking] = useState(false);
  const [title, Page, tables] = PAGES[at.path];
  useEffect(() => {
    const moved = () => { notice.value = null; setAt(place()); document.getElementById('main').focus(); };
    addEventListener('hashchange', moved);
    return () => removeEventListener('hashchange', moved);
  }, []);
  useEffect(() => { watch(tables.length ? tables : ['summary']); document.title = `${title} · Headrace console`; }, [at.path]);
  const enter = async (event) => {
    event.preventDefault();
    await setKey(new FormData(event.target).get('key').trim());
    if (access.value.admin) setAsking(false); else notice.value = { kind: 'bad', text: 'That is no admin key of this deployment.' };
  };
  return html`<a class="skip" href="#main" onClick=${(e) => { e.preventDefault(); document.getElementById('main').focus(); }}>To the content</a>
    <header class="bar"><strong>Headrace</strong>
      <nav aria-label="Pages">${Object.entries(PAGES).map(([path, [name]]) => html`<a href=${`#/${path}`} aria-current=${path === at.path ? 'page' : undefined}>${name}</a>`)}</nav>
      <span role="status" class=${state === 'live' ? 'good' : 'warn'}>${state === 'live' ? '● live' : `○ ${state}`}</span>
      ${may.admin ? html`<span>admin <button type="button" onClick=${() => setKey('')}>Forget the key</button></span>`
        : html`<button type="button" aria-expanded=${asking} onClick=${() => setAsking(!asking)}>${key() ? 'Another key' : 'Read-only: enter key'}</button>`}
    </header>
    <main id="main" tabindex="-1">
      ${asking && !may.admin && html`<form class="line" onSubmit=${enter}><label>Admin key<input name="key" type="password" size="44" autocomplete="off" /></label><button type="submit">Use it</button></form>`}
      ${said && html`<p class=${`note ${said.kind}`} role="status">${said.text}</p>`}
      ${may.sees ? html`<${Page} id=${at.id} key=${at.path} />` : html`<h1>${title}</h1><p>This console shows nothing without its key. <code>headrace up</code> and <code>headrace console</code> print a link that holds it.</p>`}
    </main>`;
}

takeKeyFromAddress();
render(html`<${App} />`, document.getElementById('app'));
document.getElementById('app').dataset.painted = String(Math.round(performance.now()));
readAccess();
