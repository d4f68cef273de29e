/* Data, fetched when a page needs it and kept while its run is the same. */
const kept = new Map();
const MOST_KEPT = 60;

async function fetched(path) {
  const answer = await fetch(`data/${path}`);
  if (answer.ok) return answer.json();
  let said = "";
  try { said = (await answer.json()).detail ?? ""; } catch { said = ""; }
  throw new Error(typeof said === "string" && said ? said : `There is nothing at ${path} (${answer.status}).`);
}

/* Data of a run: the same as long as nothing was added to it. */
async function ofRun(run, path) {
  const key = `${run}/${path}`, version = state.versions.get(run) ?? 0, known_ = kept.get(key);
  if (known_ && known_.version === version) return known_.value;
  const value = await fetched(key);
  kept.delete(key);
  kept.set(key, { version, value });
  if (kept.size > MOST_KEPT) kept.delete(kept.keys().next().value);
  return value;
}
