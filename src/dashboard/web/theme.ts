/** Light and dark: the system's choice, or the reader's. */
import { useEffect, useState } from 'preact/hooks';

export type Theme = 'light' | 'dark';

const KEY = 'trefoil-theme';
const query = matchMedia('(prefers-color-scheme: dark)');
const listeners = new Set<() => void>();

function currentTheme(): Theme {
  const stored = localStorage.getItem(KEY);
  if (stored === 'light' || stored === 'dark') return stored;
  return query.matches ? 'dark' : 'light';
}

export function applyTheme(): void {
  document.documentElement.dataset['theme'] = currentTheme();
  for (const listener of listeners) listener();
}

export function toggleTheme(): void {
  localStorage.setItem(KEY, currentTheme() === 'dark' ? 'light' : 'dark');
  applyTheme();
}

query.addEventListener('change', applyTheme);

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
