/**
 * A document of headings, tables, lists and charts, written as Markdown or as HTML. Texts may come from the files of an
 * untrusted run: both writers escape them.
 */
import { escapeXml } from './svg.js';

/** A cell of a table; an array is shown as lines. */
export type Cell = string | readonly string[];

export interface Link {
  readonly text: string;
  /** Relative path, not encoded. */
  readonly path: string;
}

/** A chart that Markdown shows as a picture. */
export interface Chart {
  readonly title: string;
  readonly file: string;
}

export type DocumentElement =
  | { readonly heading: string; readonly level: 1 | 2 }
  | { readonly paragraph: string; readonly links?: readonly Link[] }
  | { readonly table: { readonly head: readonly string[]; readonly rows: readonly (readonly Cell[])[] } }
  | { readonly list: readonly string[] }
  | { readonly charts: readonly Chart[] };

/** Markdown that refers to the charts by their files. */
export function toMarkdown(elements: readonly DocumentElement[]): string {
  return `${elements.map(markdownOf).join('\n\n')}\n`;
}

function markdownOf(element: DocumentElement): string {
  if ('heading' in element) return `${'#'.repeat(element.level)} ${escapeMarkdown(element.heading)}`;
  if ('paragraph' in element) {
    const links = (element.links ?? []).map(({ text, path }) => `[${escapeMarkdown(text)}](${encodePath(path)})`);
    return escapeMarkdown(element.paragraph) + links.join(', ');
  }
  if ('list' in element) return element.list.map((item) => `- ${escapeMarkdown(item)}`).join('\n');
  if ('charts' in element)
    return element.charts.map(({ title, file }) => `![${escapeMarkdown(title)}](${encodePath(file)})`).join('\n\n');
  const { head, rows } = element.table;
  const line = (cells: readonly string[]) => `| ${cells.join(' | ')} |`;
  const cell = (value: Cell) => (typeof value === 'string' ? [value] : value).map(escapeMarkdown).join('<br>');
  return [line(head.map(cell)), line(head.map(() => '---')), ...rows.map((row) => line(row.map(cell)))].join('\n');
}

/** Escapes what would start HTML, a link, code or a table cell; a line break becomes a space. */
function escapeMarkdown(text: string): string {
  return text
    .replace(/\s+/g, ' ')
    .replace(/[\\`[\]|]/g, '\\$&')
    .replace(/[&<>]/g, (character) => `&#${character.charCodeAt(0)};`);
}

/** Every segment is encoded, so that a folder named `javascript:…` does not become a URL scheme. */
function encodePath(path: string): string {
  return path.split('/').map(encodeURIComponent).join('/');
}

/** HTML for the body of a page. In place of the charts it has an element that the script of the page fills. */
export function toHtml(elements: readonly DocumentElement[]): string {
  return elements.map(htmlOf).join('\n');
}

const NO_SCRIPT = '<p>The charts need the script in this file. report.md shows them as pictures.</p>';

function htmlOf(element: DocumentElement): string {
  if ('heading' in element)
    return element.level === 1
      ? `<h1>${escapeXml(element.heading)}</h1>`
      : `<h2 class="section">${escapeXml(element.heading)}</h2>`;
  if ('paragraph' in element) {
    const links = (element.links ?? []).map(({ text, path }) => `<a href="${encodePath(path)}">${escapeXml(text)}</a>`);
    return `<p>${escapeXml(element.paragraph)}${links.join(', ')}</p>`;
  }
  if ('list' in element) return `<ul>${element.list.map((item) => `<li>${escapeXml(item)}</li>`).join('')}</ul>`;
  if ('charts' in element) return `<div id="curves"><noscript>${NO_SCRIPT}</noscript></div>`;
  const { head, rows } = element.table;
  const cell = (value: Cell) => (typeof value === 'string' ? [value] : value).map(escapeXml).join('<br>');
  const row = (cells: readonly Cell[], tag: string) =>
    `<tr>${cells.map((one) => `<${tag}>${cell(one)}</${tag}>`).join('')}</tr>`;
  // A table that is too wide scrolls, also by keyboard.
  const label = escapeXml(`Table: ${head.join(', ')}`);
  const body = rows.map((one) => row(one, 'td')).join('');
  return `<section class="table-wrap" tabindex="0" aria-label="${label}"><table><thead>${row(head, 'th')}</thead><tbody>${body}</tbody></table></section>`;
}
