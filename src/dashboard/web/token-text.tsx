/** Generated text by tokens: shaded by how improbable each was, one of them picked by mouse or keyboard. */
import { useRef } from 'preact/hooks';
import { percent } from './format.js';
import type { GeneratedToken } from './model-api.js';
import { Card } from './ui.js';

export function TokenText(props: {
  readonly label: string;
  /** Text before the tokens. */
  readonly before?: string;
  readonly tokens: readonly GeneratedToken[];
  readonly picked: number | null;
  readonly onPick: (index: number) => void;
}) {
  const { label, before = '', tokens, picked, onPick } = props;
  // A second key may come before the first is drawn.
  const at = useRef(picked);
  at.current = picked;
  const pick = (index: number) => {
    at.current = index;
    onPick(index);
  };
  const indexAt = (event: Event) => {
    const index = (event.target as HTMLElement).dataset?.['i'];
    if (index !== undefined) pick(Number(index));
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const last = tokens.length - 1;
    const moves: Record<string, number> = {
      ArrowLeft: (at.current ?? 1) - 1,
      ArrowRight: at.current === null ? 0 : at.current + 1,
      Home: 0,
      End: last,
    };
    const index = moves[event.key];
    if (index === undefined || last < 0) return;
    event.preventDefault();
    pick(Math.min(last, Math.max(0, index)));
  };
  return (
    <div
      class="text token-text"
      tabIndex={0}
      role="group"
      aria-label={`${label}. Arrow keys move from token to token.`}
      onKeyDown={onKeyDown}
      onMouseOver={indexAt}
      onClick={indexAt}
    >
      <span class="muted">{before}</span>
      {tokens.map(({ text, probability }, i) => (
        <span
          key={i}
          data-i={i}
          class={i === picked ? 'token' : ''}
          style={{ '--strength': Number.isNaN(probability) ? '0' : (1 - probability).toFixed(2) }}
        >
          {text}
        </span>
      ))}
    </div>
  );
}

/** The place of a token whose alternatives are shown: of the output, or of a message of the chat. */
export interface Picked {
  readonly tokens: readonly GeneratedToken[];
  readonly index: number;
}

export function Alternatives(props: {
  readonly picked: Picked | null;
  readonly onUse: ((text: string) => void) | null;
}) {
  const { picked, onUse } = props;
  const token = picked?.tokens[picked.index];
  return (
    <Card title="Alternatives">
      {!token ? (
        <p class="muted">Point at a token of the output.</p>
      ) : token.alternatives.length === 0 ? (
        <p class="muted">The server listed none for this token.</p>
      ) : (
        <ol class="alternatives">
          {token.alternatives.map(({ text, probability }) => {
            const content = (
              <>
                <code>{shown(text)}</code>
                <i style={{ width: `${100 * probability}%` }} />
                <small>{percent(probability)}</small>
              </>
            );
            const isWritten = text === token.text;
            return (
              <li key={text} class={isWritten ? 'written' : ''}>
                {onUse && !isWritten && !text.startsWith('token_id:') ? (
                  <button type="button" title="Continue with this token instead" onClick={() => onUse(text)}>
                    {content}
                  </button>
                ) : (
                  <span>{content}</span>
                )}
              </li>
            );
          })}
        </ol>
      )}
      {token && onUse ? <p class="note">Click one to continue with it instead.</p> : null}
    </Card>
  );
}

/** A token with its line breaks and tabs visible. */
function shown(text: string): string {
  return text.replaceAll('\n', '⏎').replaceAll('\t', '⇥').replaceAll(' ', '␣');
}
