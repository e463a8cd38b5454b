/**
 * The surface of the library: a small front door; every name has one entry point, under its own name, and a doc comment; types
 * that signatures mention are exported, or opaque.
 */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import ts from 'typescript';
import { describe, expect, it } from 'vitest';
import { root, runNode } from '../src/testing/cli.js';

/** Sources of the entry points, by their names in package.json: `./nn` is `src/exports/nn.ts`. */
function entryPoints(): Map<string, string> {
  const { exports } = JSON.parse(readFileSync(join(root, 'package.json'), 'utf8')) as {
    exports: Record<string, string | { types: string; default: string }>;
  };
  const modules = Object.entries(exports).filter(([name]) => name !== './package.json');
  return new Map(
    modules.map(([name, files]) => {
      const { types, default: code } = files as { types: string; default: string };
      expect(types.replace(/\.d\.ts$/, '.js'), name).toBe(code);
      return [name.replace('.', 'trefoil'), join(root, code.replace('dist', 'src').replace(/\.js$/, '.ts'))];
    }),
  );
}

/** The tag of a type that callers receive and pass on, and whose members are not for them. */
const OPAQUE = 'opaque';

describe('the declarations of all entry points', () => {
  const paths = entryPoints();
  const parsed = ts.getParsedCommandLineOfConfigFile(
    join(root, 'tsconfig.json'),
    {},
    {
      ...ts.sys,
      onUnRecoverableConfigFileDiagnostic: (problem) => {
        throw new Error(String(problem.messageText));
      },
    },
  );
  const program = ts.createProgram([...paths.values()], parsed!.options);
  const checker = program.getTypeChecker();
  const original = (symbol: ts.Symbol) =>
    symbol.flags & ts.SymbolFlags.Alias ? checker.getAliasedSymbol(symbol) : symbol;
  /** Every exported declaration, with the places it is exported at. */
  const exported = new Map<ts.Symbol, { readonly entry: string; readonly name: string }[]>();
  for (const [entry, path] of paths) {
    const module = checker.getSymbolAtLocation(program.getSourceFile(path)!)!;
    for (const symbol of checker.getExportsOfModule(module)) {
      const target = original(symbol);
      exported.set(target, [...(exported.get(target) ?? []), { entry, name: symbol.name }]);
    }
  }
  const all = [...exported].map(([symbol, [{ entry, name }]]) => ({ symbol, entry, name }));
  const isValue = ({ flags }: ts.Symbol) => (flags & ts.SymbolFlags.Value) !== 0;
  const isOpaque = (symbol: ts.Symbol) => symbol.getJsDocTags(checker).some(({ name }) => name === OPAQUE);

  it('are few at the front door, and none is a side door', () => {
    const front = all.filter(({ entry }) => entry === 'trefoil');
    expect(front.filter(({ symbol }) => isValue(symbol)).length).toBeLessThanOrEqual(15);
    expect(front.filter(({ symbol }) => !isValue(symbol)).length).toBeLessThanOrEqual(45);
    expect([...paths.keys()].filter((entry) => !all.some((one) => one.entry === entry))).toEqual([]);
  });

  it('are exported once, under the name that they have inside', () => {
    const wrong = [...exported].flatMap(([symbol, places]) =>
      places
        .filter(({ name }) => places.length > 1 || name !== symbol.name)
        .map(({ entry, name }) => `${entry} exports ${symbol.name} as ${name}`),
    );
    expect(wrong).toEqual([]);
  });

  /** Types of this project that a node mentions. */
  function mentioned(node: ts.Node, found: ts.Symbol[] = []): ts.Symbol[] {
    if (ts.isTypeReferenceNode(node) || ts.isExpressionWithTypeArguments(node)) {
      const symbol = checker.getSymbolAtLocation('typeName' in node ? node.typeName : node.expression);
      const target = symbol && original(symbol);
      const [declaration] = target?.declarations ?? [];
      const isOurs = declaration?.getSourceFile().fileName.startsWith(join(root, 'src'));
      if (target && isOurs && !ts.isTypeParameterDeclaration(declaration)) found.push(target);
    }
    ts.forEachChild(node, (child) => void mentioned(child, found));
    return found;
  }

  /** The parts of a declaration that its users see. */
  function signature(declaration: ts.Declaration): ts.Node[] {
    const typed = (node: ts.Node) => {
      const { type, parameters = [] } = node as { type?: ts.TypeNode; parameters?: readonly ts.ParameterDeclaration[] };
      return [type, ...parameters.map((parameter) => parameter.type)].filter((one) => one !== undefined);
    };
    if (!ts.isClassDeclaration(declaration) && !ts.isInterfaceDeclaration(declaration)) return typed(declaration);
    const members = [...declaration.members].filter(({ name }) => !name || !ts.isPrivateIdentifier(name));
    return [...(declaration.heritageClauses ?? []), ...members.flatMap(typed)];
  }

  it('mention only types that are exported or opaque', () => {
    const missing = all.flatMap(({ symbol, name }) =>
      (symbol.declarations ?? [])
        .flatMap(signature)
        .flatMap((node) => mentioned(node))
        .filter((type) => !exported.has(type) && !isOpaque(type))
        .map((type) => `${name} mentions ${type.name}`),
    );
    expect([...new Set(missing)]).toEqual([]);
    expect(all.filter(({ symbol }) => isOpaque(symbol)).map(({ name }) => `${name} is exported and opaque`)).toEqual(
      [],
    );
    expect(all.length).toBeGreaterThan(150);
  });

  it('have a doc comment', () => {
    const bare = all.filter(({ symbol }) => symbol.getDocumentationComment(checker).length === 0);
    expect(bare.map(({ name }) => name)).toEqual([]);
  });

  it.each(['Config', 'ConfigInput'])('have a comment on every key of %s', (name) => {
    const { symbol } = all.find((one) => one.name === name)!;
    const sections = checker.getDeclaredTypeOfSymbol(symbol).getProperties();
    const keys = sections.flatMap((section) =>
      checker.getNonNullableType(checker.getTypeOfSymbol(section)).getProperties(),
    );
    expect(keys.length).toBeGreaterThan(100);
    expect(keys.filter((key) => key.getDocumentationComment(checker).length === 0).map((key) => key.name)).toEqual([]);
  });

  // A process of its own: typedoc's messages go to the terminal.
  it('become pages without a warning: npm run docs', async () => {
    const typedoc = join(root, 'node_modules', 'typedoc', 'bin', 'typedoc');
    expect(await runNode([typedoc, '--emit', 'none'])).toEqual({ code: 0, stdout: '', stderr: '' });
  });
});
