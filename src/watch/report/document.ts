/**
 * A document of headings, tables, lists and charts, written as Markdown or as one HTML file. Texts may come from the files
 * of an untrusted run: both writers escape them, and the HTML allows neither scripts nor requests.
 */
import { escapeXml } from './svg.js';

/** A cell of a table; an array is shown as lines. */
export type Cell = string | readonly string[];

export interface Link {
  readonly text: string;
  /** Relative path, not encoded. */
  readonly path: string;
}

export type Block =
  | { readonly heading: string; readonly level: 1 | 2 }
  | { readonly paragraph: string; readonly links?: readonly Link[] }
  | { readonly table: { readonly head: readonly string[]; readonly rows: readonly (readonly Cell[])[] } }
  | { readonly list: readonly string[] }
  | { readonly chart: { readonly title: string; readonly file: string; readonly svg: string } };

/** Markdown that refers to the charts by their files. */
export function toMarkdown(blocks: readonly Block[]): string {
  return `${blocks.map(markdownBlock).join('\n\n')}\n`;
}

function markdownBlock(block: Block): string {
  if ('heading' in block) return `${'#'.repeat(block.level)} ${escapeMarkdown(block.heading)}`;
  if ('paragraph' in block) {
    const links = (block.links ?? []).map(({ text, path }) => `[${escapeMarkdown(text)}](${encodePath(path)})`);
    return escapeMarkdown(block.paragraph) + links.join(', ');
  }
  if ('list' in block) return block.list.map((item) => `- ${escapeMarkdown(item)}`).join('\n');
  if ('chart' in block) return `![${escapeMarkdown(block.chart.title)}](${encodePath(block.chart.file)})`;
  const { head, rows } = block.table;
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

const STYLE = `
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 860px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; border-bottom: 1px solid #ddd; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th, td { border: 1px solid #ddd; padding: 3px 8px; text-align: left; vertical-align: top; } th { background: #f5f5f5; }
svg { max-width: 100%; height: auto; } li { overflow-wrap: anywhere; }
`;

/** One HTML file with the charts inline. */
export function toHtml(blocks: readonly Block[], title: string): string {
  return [
    '<!doctype html>',
    '<html lang="en">',
    '<head>',
    '<meta charset="utf-8">',
    `<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">`,
    '<meta name="viewport" content="width=device-width, initial-scale=1">',
    `<title>${escapeXml(title)}</title>`,
    `<style>${STYLE}</style>`,
    '</head>',
    '<body>',
    ...blocks.map(htmlBlock),
    '</body>',
    '</html>',
    '',
  ].join('\n');
}

function htmlBlock(block: Block): string {
  if ('heading' in block) return `<h${block.level}>${escapeXml(block.heading)}</h${block.level}>`;
  if ('paragraph' in block) {
    const links = (block.links ?? []).map(({ text, path }) => `<a href="${encodePath(path)}">${escapeXml(text)}</a>`);
    return `<p>${escapeXml(block.paragraph)}${links.join(', ')}</p>`;
  }
  if ('list' in block) return `<ul>${block.list.map((item) => `<li>${escapeXml(item)}</li>`).join('')}</ul>`;
  if ('chart' in block) return `<p>${block.chart.svg}</p>`; // made by this program, which escapes the texts in it
  const { head, rows } = block.table;
  const cell = (value: Cell) => (typeof value === 'string' ? [value] : value).map(escapeXml).join('<br>');
  const row = (cells: readonly Cell[], tag: string) =>
    `<tr>${cells.map((one) => `<${tag}>${cell(one)}</${tag}>`).join('')}</tr>`;
  return `<div class="wide"><table>${row(head, 'th')}${rows.map((one) => row(one, 'td')).join('')}</table></div>`;
}
