/** The web application: addresses, the frame of every page, light and dark. */
import { render } from 'preact';
import { useEffect, useRef, useState } from 'preact/hooks';
import { AttentionPage } from './attention-page.js';
import { parts } from './model-api.js';
import { NEW_SESSION, PlaygroundPage, ReadingPage, type Session } from './playground-page.js';
import { ReaderPage } from './reader-page.js';
import { RunPage } from './run-page.js';
import { RunsPage } from './runs-page.js';
import { applyTheme } from './theme.js';
import { Empty, Leaf, runAddress, ThemeSwitch } from './ui.js';

/** The parts of `#/run/NAME/attention`, decoded. */
function useRoute(): string[] {
  const read = () =>
    location.hash
      .replace(/^#\/?/, '')
      .split('/')
      .filter((part) => part !== '')
      .map(decode);
  const [route, setRoute] = useState(read);
  useEffect(() => {
    const update = () => setRoute(read());
    addEventListener('hashchange', update);
    return () => removeEventListener('hashchange', update);
  }, []);
  return route;
}

/** A name in the address may be anything; a broken escape is shown as it is. */
function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch (error) {
    if (!(error instanceof URIError)) throw error;
    return part;
  }
}

const TABS = [
  ['', 'Curves'],
  ['attention', 'Attention'],
  ['reader', 'Reader'],
] as const;

function App() {
  const route = useRoute();
  const main = useRef<HTMLElement>(null);
  const [kind, ...rest] = route;
  const address = route.join('/');
  const isFirst = useRef(true);
  // Kept while other pages are shown.
  const [session, setSession] = useState(NEW_SESSION);
  const change = (part: Partial<Session>) => setSession((now) => ({ ...now, ...part }));
  // After navigation the keyboard continues at the top of the new page.
  useEffect(() => {
    if (!isFirst.current) main.current?.focus({ preventScroll: true });
    isFirst.current = false;
    scrollTo(0, 0);
    document.title = route.length > 0 ? `${rest[0] ?? kind} · Trefoil` : 'Trefoil';
  }, [address]);
  return (
    <>
      <button type="button" class="skip" onClick={() => main.current?.focus()}>
        Skip to content
      </button>
      <header class="bar">
        <a class="brand" href="#/">
          <svg viewBox="0 0 32 32" width="24" height="24" aria-hidden="true">
            <Leaf />
          </svg>
          Trefoil
        </a>
        {kind === 'run' ? (
          <nav aria-label="Pages of the run" class="tabs">
            <span class="crumb" title={rest[0]}>
              {rest[0]}
            </span>
            {TABS.map(([part, text]) => (
              <a
                key={part}
                href={runAddress(rest[0], ...(part ? [part] : []))}
                aria-current={(rest[1] ?? '') === part ? 'page' : undefined}
              >
                {text}
              </a>
            ))}
          </nav>
        ) : kind === 'compare' ? (
          <span class="crumb">{rest.length} runs</span>
        ) : parts.has('runs') && parts.has('model') ? (
          <nav aria-label="Pages" class="tabs">
            <a href="#/" aria-current={kind === undefined ? 'page' : undefined}>
              Runs
            </a>
            <a href="#/playground" aria-current={kind === 'playground' ? 'page' : undefined}>
              Playground
            </a>
          </nav>
        ) : null}
        <ThemeSwitch />
      </header>
      <main id="main" ref={main} tabIndex={-1}>
        <Page key={address.replace(/(\/reader)\/.*$/, '$1')} {...{ route, session, change }} />
      </main>
    </>
  );
}

function Page(props: {
  readonly route: readonly string[];
  readonly session: Session;
  readonly change: (part: Partial<Session>) => void;
}) {
  const { session, change } = props;
  const [kind = parts.has('runs') ? undefined : 'playground', ...rest] = props.route;
  if (kind === 'playground' && parts.has('model'))
    return rest[0] ? <ReadingPage id={rest[0]} session={session} /> : <PlaygroundPage {...{ session, change }} />;
  if (kind === undefined) return <RunsPage />;
  if (kind === 'compare' && rest.length > 0) return <RunPage names={rest} />;
  if (kind === 'run' && rest[0]) {
    if (rest[1] === 'attention') return <AttentionPage name={rest[0]} />;
    if (rest[1] === 'reader') return <ReaderPage name={rest[0]} trace={rest[2]} />;
    if (rest[1] === undefined) return <RunPage names={[rest[0]]} />;
  }
  return (
    <Empty title="There is no such page">
      <p>
        <a href="#/">All runs</a>
      </p>
    </Empty>
  );
}

applyTheme();
render(<App />, document.getElementById('app')!);
