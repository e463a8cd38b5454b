/** Light and dark: the system's choice, or the reader's. */
import { useEffect, useState } from 'preact/hooks';

export type Theme = 'light' | 'dark';

const KEY = 'trefoil-theme';
const query = matchMedia('(prefers-color-scheme: dark)');
const listeners = new Set<() => void>();

let chosen = storedTheme();
let isPrinting = false;

/** Undefined if the reader has not chosen, or if the browser keeps nothing for this page, as for some files. */
function storedTheme(): Theme | undefined {
  try {
    const stored = localStorage.getItem(KEY);
    return stored === 'light' || stored === 'dark' ? stored : undefined;
  } catch (error) {
    if (!(error instanceof DOMException)) throw error;
    return undefined;
  }
}

function currentTheme(): Theme {
  if (isPrinting) return 'light'; // paper is white
  return chosen ?? (query.matches ? 'dark' : 'light');
}

export function applyTheme(): void {
  document.documentElement.dataset['theme'] = currentTheme();
  for (const listener of listeners) listener();
}

export function toggleTheme(): void {
  chosen = currentTheme() === 'dark' ? 'light' : 'dark';
  try {
    localStorage.setItem(KEY, chosen);
  } catch (error) {
    if (!(error instanceof DOMException)) throw error; // not kept: the choice holds until the page is closed
  }
  applyTheme();
}

query.addEventListener('change', applyTheme);
for (const [event, begins] of [
  ['beforeprint', true],
  ['afterprint', false],
] as const)
  addEventListener(event, () => {
    isPrinting = begins;
    applyTheme();
  });

/** The theme, for components that draw on a canvas. */
export function useTheme(): Theme {
  const [theme, setTheme] = useState(currentTheme);
  useEffect(() => {
    const update = () => setTheme(currentTheme());
    listeners.add(update);
    return () => void listeners.delete(update);
  }, []);
  return theme;
}

/** The value of a custom property of the style sheet. */
export function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Colours of lines: distinguishable in both themes and without red-green vision. */
export function lineColour(i: number): string {
  return colour(`line-${i % 6}`);
}
