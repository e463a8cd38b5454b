// Collects source code from the packages that are installed on this machine, as a corpus of long documents.
//
//   node collect.mjs --out corpus [--from DIR]… [--language python,javascript] [--max-mb 32] [--document-kb 256] [--validation 0.03]
//
// --language takes the first of these languages that the machine has a megabyte of, else the one it has most of; without
// it all languages are taken.
// Writes train.jsonl and val.jsonl (a document a line: {project, text}) and corpus.json (what was taken and what was not).
// - A file with the same text as another, apart from white space, is taken once.
// - The files of a project follow each other by path, so that a folder's files stand together, up to --document-kb.
// - A project is either trained on or validated on, whatever version of it lies in several places.
import { createHash } from 'node:crypto';
import {
  closeSync,
  existsSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { join, relative, resolve, sep } from 'node:path';
import { parseArgs } from 'node:util';

const LANGUAGES = {
  python: ['py', 'pyi'],
  c: ['c', 'h', 'cc', 'cpp', 'cxx', 'hpp', 'hh', 'inl', 'cu', 'cuh'],
  javascript: ['js', 'mjs', 'cjs', 'jsx', 'ts', 'tsx'],
  go: ['go'],
  rust: ['rs'],
  java: ['java'],
  ruby: ['rb'],
  lua: ['lua'],
  perl: ['pl', 'pm'],
  shell: ['sh'],
};
const ENOUGH_BYTES = 1e6;
/** Folders whose name says nothing of a project: the first other folder of a path does. */
const GENERIC =
  /^(bin|dist|include|lib|lib32|lib64|libexec|local|opt|share|src|usr|python[\d.]*|perl[\d.]*|[a-z\d_]+-linux-gnu\w*)$/;
const PACKAGE_FOLDERS = ['node_modules', 'site-packages', 'dist-packages'];
const MIN_BYTES = 200;
const MAX_BYTES = 1 << 20;
/** Longer lines on average: minified or generated. */
const LONG_LINES = 150;
/** A larger share of digits and commas: a table, not a program. */
const MANY_DIGITS = 0.3;
/** With --max-mb no project is more than this share of the corpus. */
const ONE_PROJECT_SHARE = 0.1;

const { values } = parseArgs({
  options: {
    out: { type: 'string' },
    from: { type: 'string', multiple: true },
    language: { type: 'string' },
    'max-mb': { type: 'string', default: '100000' },
    'document-kb': { type: 'string', default: '256' },
    validation: { type: 'string', default: '0.03' },
  },
});
if (values.out === undefined) throw new Error('--out FOLDER is missing');
const limit = number('max-mb') * 1e6;
const documentBytes = number('document-kb') * 1024;
const validationShare = number('validation');
const asked = values.language?.split(',') ?? Object.keys(LANGUAGES);
for (const name of asked)
  if (!LANGUAGES[name]) throw new Error(`--language: ${name} is not one of ${Object.keys(LANGUAGES).join(', ')}`);
const languageOf = new Map(asked.flatMap((name) => LANGUAGES[name].map((extension) => [extension, name])));
const roots = (values.from ?? [nearestModules(), '/usr', '/opt'])
  .filter((root) => root && existsSync(root))
  .map((root) => resolve(root));

const skipped = { duplicate: 0, minified: 0, 'mostly numbers': 0, 'not text': 0, unreadable: 0 };
const seen = new Set();
/** @type {Map<string, {path: string, name: string, bytes: number, language: string}[]>} */
const projects = new Map();
let found = 0;
for (const root of roots)
  for (const path of walk(root)) {
    const text = accepted(path);
    if (text === undefined) continue;
    const { project, name } = placeOf(relative(root, path).split(sep));
    const files = projects.get(project) ?? [];
    files.push({ path, name, bytes: Buffer.byteLength(text), language: languageOf.get(extensionOf(path)) });
    projects.set(project, files);
    if (++found % 1000 === 0) progress(`${found} files of ${projects.size} projects`);
  }
progress('');
if (found === 0) throw new Error(`no source files in ${roots.join(', ')}; name folders with --from`);

if (values.language !== undefined) keepLanguage();
// In the order of a hash, so that any part of the list is a fair sample of the projects.
const order = [...projects.keys()].sort((a, b) => (digest(a) < digest(b) ? -1 : 1));
const total = [...projects.values()].flat().reduce((sum, { bytes }) => sum + bytes, 0);
const wanted = Math.min(limit, total);
const parts = {
  train: { projects: 0, documents: 0, files: 0, bytes: 0 },
  val: { projects: 0, documents: 0, files: 0, bytes: 0 },
};
const languages = {};
mkdirSync(values.out, { recursive: true });
const outputs = {
  train: openSync(join(values.out, 'train.jsonl'), 'w'),
  val: openSync(join(values.out, 'val.jsonl'), 'w'),
};
const validationProjects = [];
for (const project of order) {
  if (parts.train.bytes + parts.val.bytes >= wanted) break;
  const files = firstBytes(projects.get(project), limit < total ? wanted * ONE_PROJECT_SHARE : total);
  if (files.length === 0) continue;
  const bytes = files.reduce((sum, file) => sum + file.bytes, 0);
  // A project larger than the whole validation part would be all of it.
  const isValidation = parts.val.bytes < validationShare * wanted && bytes < 0.5 * validationShare * wanted;
  if (isValidation) validationProjects.push(project);
  write(project, files, isValidation ? 'val' : 'train');
}
for (const file of Object.values(outputs)) closeSync(file);
if (parts.val.bytes === 0) throw new Error('no project is small enough for validation; raise --validation or --max-mb');
const summary = {
  found: { files: found, projects: projects.size, bytes: total },
  skipped,
  languages,
  train: parts.train,
  validation: { ...parts.val, names: validationProjects },
};
writeFileSync(join(values.out, 'corpus.json'), `${JSON.stringify(summary, null, 2)}\n`);
const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;
console.log(
  `found ${found} files of ${projects.size} projects, ${megabytes(total)}; skipped ${Object.entries(skipped)
    .map(([why, count]) => `${count} ${why}`)
    .join(', ')}`,
);
for (const [name, { projects: count, documents, files, bytes }] of Object.entries(parts))
  console.log(`${name}.jsonl: ${count} projects, ${files} files in ${documents} documents, ${megabytes(bytes)}`);

function number(name) {
  const value = Number(values[name]);
  if (!(value > 0)) throw new Error(`--${name}: ${values[name]} is not a number above 0`);
  return value;
}

function extensionOf(name) {
  return name.slice(name.lastIndexOf('.') + 1);
}

/** Leaves the files of one language, the first that there is enough of. */
function keepLanguage() {
  const bytesOf = (name) =>
    [...projects.values()].flat().reduce((sum, { language, bytes }) => sum + (language === name ? bytes : 0), 0);
  const most = [...asked].sort((a, b) => bytesOf(b) - bytesOf(a))[0];
  const kept = asked.find((name) => bytesOf(name) >= ENOUGH_BYTES) ?? most;
  for (const [project, files] of projects) {
    const left = files.filter(({ language }) => language === kept);
    if (left.length > 0) projects.set(project, left);
    else projects.delete(project);
  }
}

function nearestModules() {
  for (let folder = process.cwd(); ; folder = join(folder, '..')) {
    if (existsSync(join(folder, 'node_modules'))) return join(folder, 'node_modules');
    if (folder === join(folder, '..')) return undefined;
  }
}

/** Files with one of the extensions, in a fixed order. Links are not followed. */
function* walk(folder) {
  let entries;
  try {
    entries = readdirSync(folder, { withFileTypes: true });
  } catch (error) {
    if (error.code !== 'EACCES' && error.code !== 'ENOENT') throw error;
    skipped.unreadable++;
    return;
  }
  for (const entry of entries.sort((a, b) => (a.name < b.name ? -1 : 1))) {
    const path = join(folder, entry.name);
    if (entry.isDirectory()) yield* walk(path);
    else if (entry.isFile() && languageOf.has(extensionOf(entry.name))) yield path;
  }
}

/** The text of a file that belongs into the corpus. */
function accepted(path) {
  let bytes;
  try {
    bytes = readFileSync(path);
  } catch (error) {
    if (error.code !== 'EACCES' && error.code !== 'ENOENT') throw error;
    skipped.unreadable++;
    return undefined;
  }
  if (bytes.length < MIN_BYTES || bytes.length > MAX_BYTES) return undefined;
  const text = bytes.toString('utf8');
  if (text.includes('\0') || text.includes('\uFFFD')) return void skipped['not text']++;
  if (text.length / text.split('\n').length > LONG_LINES) return void skipped.minified++;
  if (text.replace(/[^\d,]/g, '').length > MANY_DIGITS * text.length) return void skipped['mostly numbers']++;
  const key = digest(text.replace(/\s+/g, ''));
  if (seen.has(key)) return void skipped.duplicate++;
  seen.add(key);
  return text;
}

/** The project of a file, and its name inside the project. */
function placeOf(parts) {
  let start = 0;
  for (const [at, part] of parts.entries()) if (PACKAGE_FOLDERS.includes(part)) start = at + 1;
  const inside = parts.slice(start);
  const isScoped = inside[0]?.startsWith('@') && inside.length > 2;
  if (isScoped) return { project: `${inside[0]}/${inside[1]}`, name: inside.slice(2).join('/') };
  const first = inside.findIndex((part, at) => at < inside.length - 1 && !GENERIC.test(part));
  if (first === -1) return { project: inside.slice(0, -1).join('/') || 'loose files', name: inside.at(-1) };
  return { project: inside[first], name: inside.slice(first + 1).join('/') };
}

function firstBytes(files, most) {
  let bytes = 0;
  return files.filter((file) => {
    bytes += file.bytes;
    return bytes <= most;
  });
}

/** Appends the files of a project, as documents of at most `documentBytes` (or one file). */
function write(project, files, part) {
  const sum = parts[part];
  let [text, bytes] = ['', 0];
  const end = () => {
    if (bytes === 0) return;
    writeSync(outputs[part], `${JSON.stringify({ project, text })}\n`);
    sum.documents++;
    [text, bytes] = ['', 0];
  };
  for (const file of [...files].sort((a, b) => (a.name < b.name ? -1 : 1))) {
    if (bytes + file.bytes > documentBytes) end();
    text += `=== ${project}/${file.name}\n${readFileSync(file.path, 'utf8').replace(/\r\n/g, '\n').trimEnd()}\n\n`;
    bytes += file.bytes;
    sum.bytes += file.bytes;
    sum.files++;
    languages[file.language] = (languages[file.language] ?? 0) + file.bytes;
  }
  end();
  sum.projects++;
}

function digest(text) {
  return createHash('sha1').update(text).digest('base64');
}

function progress(text) {
  if (process.stderr.isTTY) process.stderr.write(`\r\x1b[K${text}`);
}
