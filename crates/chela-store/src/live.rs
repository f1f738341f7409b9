//! How replies fared lately: the turns that say something about it, by profile.

use crate::{
    apply::Change,
    error::{Fail, reading},
    reads::{Read, limit, unsigned},
    turns::key,
};
use chela_core::{LiveTurn, Profile, TOOL_ERROR, TurnId};
use rusqlite::{OptionalExtension, params};

impl Change<'_> {
    /// A main turn was judged, or followed by a tool's result.
    pub fn enliven(&self, turn: TurnId, tool: bool) -> Result<(), Fail> {
        let sql = "INSERT INTO live
               SELECT s.profile, t.id, ?2 FROM turns t JOIN sessions s USING (sid) WHERE t.id = ?1 AND t.kind = 'main'
             ON CONFLICT (profile, turn) DO UPDATE SET tool = max(tool, excluded.tool)";
        self.conn
            .prepare_cached(sql)?
            .execute(params![key(turn.0), tool])?;
        Ok(())
    }

    /// What followed a turn is forgotten: only a verdict that is left keeps it in the list.
    pub fn unfollow(&self, profile: &Profile, turn: i64) -> Result<(), Fail> {
        let values = params![profile.as_str(), turn];
        for sql in [
            "UPDATE live SET tool = 0 WHERE profile = ?1 AND turn = ?2",
            "DELETE FROM live WHERE profile = ?1 AND turn = ?2
               AND NOT EXISTS (SELECT 1 FROM verdicts WHERE turn = ?2)",
        ] {
            self.conn.prepare_cached(sql)?.execute(values)?;
        }
        Ok(())
    }
}

impl Read<'_> {
    pub fn live_turns(&self, profile: &Profile, most: usize) -> Result<Vec<LiveTurn>, Fail> {
        let sql = "SELECT l.turn, t.version, length(t.reply) / 4, l.tool, t.completed
             FROM live l JOIN turns t ON t.id = l.turn WHERE l.profile = ?1 ORDER BY l.turn DESC LIMIT ?2";
        let mut statement = self.conn.prepare_cached(sql)?;
        let rows = statement.query_map(params![profile.as_str(), limit(most)], |row| {
            let turn = LiveTurn {
                turn: TurnId(unsigned(row, 0)?),
                at: row.get(4)?,
                version: unsigned(row, 1)?,
                reward: None,
                reply_len: row.get::<_, u32>(2)? as usize,
                tool_error: None,
            };
            Ok((turn, row.get::<_, bool>(3)?))
        })?;
        let mut turns = Vec::new();
        for row in rows {
            let (turn, tool) = row.map_err(reading("a turn in the list of judged ones"))?;
            let failed = tool && self.tool_failed(turn.turn)?;
            turns.push(LiveTurn {
                reward: self.last_reward(turn.turn)?,
                tool_error: tool.then_some(failed),
                ..turn
            });
        }
        Ok(turns)
    }

    fn last_reward(&self, turn: TurnId) -> Result<Option<f32>, Fail> {
        let sql = "SELECT reward FROM verdicts WHERE turn = ?1 AND reward IS NOT NULL ORDER BY id DESC LIMIT 1";
        let mut statement = self.conn.prepare_cached(sql)?;
        let reward = statement.query_row([key(turn.0)], |row| row.get::<_, f64>(0));
        let reward = reward.optional().map_err(reading(turn))?;
        Ok(reward.map(|r| (r as f32).clamp(-1.0, 1.0)))
    }

    fn tool_failed(&self, turn: TurnId) -> Result<bool, Fail> {
        let sql = "SELECT 1 FROM verdicts WHERE turn = ?1 AND judge = ?2";
        let mut statement = self.conn.prepare_cached(sql)?;
        Ok(statement.exists(params![key(turn.0), TOOL_ERROR])?)
    }
}
