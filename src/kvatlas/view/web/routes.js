/* Addresses: every run, map, cell, problem, trace and token has one, behind the #. */
const to = (...parts) => `#/${parts.map((part) => encodeURIComponent(part)).join("/")}`;
const withQuery = (address, values) => {
  const query = new URLSearchParams(Object.entries(values).filter(([, value]) => known(value) && value !== "").map(([name, value]) => [name, String(value)])).toString();
  return query ? `${address}?${query}` : address;
};

function here() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  let parts = [];
  try { parts = path.split("/").filter(Boolean).map(decodeURIComponent); } catch { parts = ["?"]; }
  return { parts, query: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

/* The address changes, and back leads to where one was; `instead` of it where it only tells more of the same page. */
function lead(address, instead = false) {
  if (instead) history.replaceState(null, "", address);
  else location.hash = address;
}

const numbered = (part, what) => {
  if (!/^\d{1,9}$/.test(part ?? "")) throw new Error(`${JSON.stringify(part ?? "")} is no number of a ${what}.`);
  return Number(part);
};
