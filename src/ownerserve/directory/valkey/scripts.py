"""Two scripts run inside Valkey: one reads with a term, one writes if unchanged.

They decide nothing about owners. What they guard is the term:

- `master_replid` changes whenever a server starts or is promoted. A primary that finds another
  one in the term's record was not the one that issued under it, so it starts a new term: one above,
  with a nonce that the caller drew. Two primaries that did not hear of each other may reach the
  same ordinal, never the same nonce. Looking it up costs 7 us a script, and no clock is asked.
- An epoch above what this memory issued, carried by a caller, means that memory was lost
  (a flush, an old snapshot): a new term again, and no new owners until old leases have run out.
"""

from __future__ import annotations

_REPLID = """
local function replid()
  return string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
end
local function text(number) return string.format('%.0f', number) end
"""

# KEYS: meta. The records are read after it, by MGET in the same trip: what changes in between is
# found when the decision is committed.
# ARGV: ordinal, nonce, counter of the highest epoch seen; a fresh nonce; grace us; 'forget' or ''
# gives: now us, ordinal, nonce, counter, open-at us
BEGIN = (
    _REPLID
    + """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local meta = redis.call('HMGET', KEYS[1], 'ordinal', 'nonce', 'counter', 'replid', 'open_us')
local ordinal, nonce = tonumber(meta[1] or 0), tonumber(meta[2] or 0)
local counter, open = tonumber(meta[3] or 0), tonumber(meta[5] or 0)
local seen = {tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])}
local behind = seen[1] > ordinal
  or (seen[1] == ordinal and seen[2] > nonce)
  or (seen[1] == ordinal and seen[2] == nonce and seen[3] > counter)
local here = replid()
if not meta[1] or behind or ARGV[6] == 'forget' then open = now + tonumber(ARGV[5]) end
if not meta[1] or behind or ARGV[6] == 'forget' or meta[4] ~= here then
  ordinal, nonce, counter = math.max(ordinal, seen[1]) + 1, tonumber(ARGV[4]), 0
  redis.call('HSET', KEYS[1], 'ordinal', text(ordinal), 'nonce', text(nonce), 'counter', '0',
    'replid', here, 'open_us', text(open))
end
return {now, ordinal, nonce, counter, open}
"""
)

# KEYS: meta
# ARGV: ordinal, nonce, decisions in one string, big endian and unaligned:
#   decision: mints u8, items u32;  item: action u8, then three lengths u32 and as many bytes:
#   key, what is expected there ('': absent), value
#   action 0 leaves it, 1 sets it, 2 deletes it, 3 sets it with the new counter behind it
# gives: for each decision the counter it used (0: none), -1 where a record had changed;
#   nothing at all when the term is another
COMMIT = (
    _REPLID
    + """
local meta = redis.call('HMGET', KEYS[1], 'ordinal', 'nonce', 'replid')
if meta[1] ~= ARGV[1] or meta[2] ~= ARGV[2] or meta[3] ~= replid() then return {} end
local CHUNK = 1000
local text, at, answer = ARGV[3], 1, {}
local function field(length)
  at = at + length
  return string.sub(text, at - length, at - 1)
end
local function commit(mints, actions, keys, expected, values)
  local count, counter, sets = #actions, 0, {}
  for start = 1, count, CHUNK do
    local now = redis.call('MGET', unpack(keys, start, math.min(start + CHUNK - 1, count)))
    for i = 1, #now do
      if (now[i] or '') ~= expected[start + i - 1] then return -1 end
    end
  end
  if mints == 1 then counter = redis.call('HINCRBY', KEYS[1], 'counter', 1) end
  for i = 1, count do
    if actions[i] == 2 then redis.call('DEL', keys[i]) end
    if actions[i] == 3 then values[i] = values[i] .. struct.pack('>I8', counter) end
    if actions[i] == 1 or actions[i] == 3 then
      sets[#sets + 1] = keys[i]
      sets[#sets + 1] = values[i]
    end
    if #sets >= CHUNK or (i == count and #sets > 0) then
      redis.call('MSET', unpack(sets))
      sets = {}
    end
  end
  return counter
end
while at <= #text do
  local mints, count, counter = 0, 0, 0
  mints, count, at = struct.unpack('>BI4', text, at)
  local actions, keys, expected, values, sets = {}, {}, {}, {}, {}
  local only_new = mints == 0 and count > 0 and count <= CHUNK
  for i = 1, count do
    local k, e, v
    actions[i], k, e, v, at = struct.unpack('>BI4I4I4', text, at)
    keys[i], expected[i], values[i] = field(k), field(e), field(v)
    only_new = only_new and actions[i] == 1 and e == 0
    if only_new then sets[2 * i - 1], sets[2 * i] = keys[i], values[i] end
  end
  if only_new then
    if redis.call('MSETNX', unpack(sets)) == 0 then counter = -1 end
  else
    counter = commit(mints, actions, keys, expected, values)
  end
  answer[#answer + 1] = counter
end
redis.call('HINCRBY', KEYS[1], 'commits', 1)
return answer
"""
)
