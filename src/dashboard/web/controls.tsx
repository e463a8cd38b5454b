/** Halt and save: the two writes of the dashboard. They need the token that was printed at its start. */
import { useState } from 'preact/hooks';
import type { RunRow } from '../answers.js';
import { api } from './api.js';
import { Card } from './ui.js';

const KEY = 'trefoil-token';

export function Controls({ row, onDone }: { readonly row: RunRow; readonly onDone: () => void }) {
  const [token, setToken] = useState(sessionStorage.getItem(KEY) ?? '');
  const [reason, setReason] = useState('');
  const [isAsking, setIsAsking] = useState(false);
  const [message, setMessage] = useState<{ text: string; isError: boolean } | null>(null);
  if (row.state !== 'running') return null;
  const act = async (action: 'halt' | 'save') => {
    setIsAsking(false);
    try {
      const text = await api.control(row.name, action, token, reason);
      sessionStorage.setItem(KEY, token);
      setMessage({ text, isError: false });
      onDone();
    } catch (error) {
      setMessage({ text: (error as Error).message, isError: true });
    }
  };
  return (
    <Card title="Control" note="A halt stops the run after its step and a checkpoint; it can be resumed.">
      <div class="row">
        <input
          type="password"
          placeholder="Token"
          aria-label="Token printed at the start of the dashboard"
          autocomplete="off"
          value={token}
          onInput={(event) => setToken(event.currentTarget.value)}
        />
        <button type="button" class="button" disabled={token === ''} onClick={() => act('save')}>
          Save now
        </button>
        <button type="button" class="button danger" disabled={token === ''} onClick={() => setIsAsking(true)}>
          Halt…
        </button>
      </div>
      {isAsking ? (
        <form
          class="row confirm"
          onSubmit={(event) => {
            event.preventDefault();
            void act('halt');
          }}
        >
          <input
            aria-label="Reason"
            placeholder="Reason (optional)"
            value={reason}
            onInput={(event) => setReason(event.currentTarget.value)}
          />
          <button type="submit" class="button danger">
            Halt {row.name}
          </button>
          <button type="button" class="button" onClick={() => setIsAsking(false)}>
            Cancel
          </button>
        </form>
      ) : null}
      {message ? (
        <p role="status" class={message.isError ? 'error' : 'success'}>
          {message.text}
        </p>
      ) : null}
    </Card>
  );
}
