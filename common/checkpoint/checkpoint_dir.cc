#include "common/checkpoint/checkpoint_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include <spdlog/spdlog.h>
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "common/check.h"
#include "common/checkpoint/json_fields.h"
#include "common/checkpoint/manifest.h"
#include "common/clock.h"
#include "common/files.h"
#include "common/status.h"
#include "common/text.h"

namespace ps {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "checkpoint-";

std::string NameOf(uint64_t number) { return absl::StrFormat("checkpoint-%06d", number); }

// The number in a name that NameOf gives. Above the limit it is nobody's who counts from 1.
std::optional<uint64_t> NumberOf(const std::string& name) {
  constexpr uint64_t kMax = 1'000'000'000'000;
  uint64_t number = 0;
  if (!name.starts_with(kPrefix) || !absl::SimpleAtoi(name.substr(kPrefix.size()), &number)) return std::nullopt;
  if (number > kMax || NameOf(number) != name) return std::nullopt;
  return number;
}

// UNAVAILABLE: another process holds it.
absl::StatusOr<FileDescriptor> LockFile(const std::string& path) {
  FileDescriptor file(open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666));
  if (!file.valid() && errno == ELOOP) return absl::InvalidArgumentError(path + ": it is a symbolic link");
  if (!file.valid()) return FileError(path, "opening");
  int locked = flock(file.get(), LOCK_EX | LOCK_NB);
  while (locked != 0 && errno == EINTR) locked = flock(file.get(), LOCK_EX | LOCK_NB);
  if (locked == 0) return file;
  return errno == EWOULDBLOCK ? absl::UnavailableError(path + ": another process holds it")
                              : FileError(path, "locking");
}

// The file as the system's table of locks names it: "08:01:4711". Its device is the mounted file system's, which some
// file systems (btrfs, overlayfs) do not tell by stat(2). Empty: it cannot be told.
std::string NameInLocks(const std::string& path) {
  struct statx about = {};
  if (statx(AT_FDCWD, path.c_str(), AT_SYMLINK_NOFOLLOW, STATX_INO | STATX_MNT_ID, &about) != 0) return "";
  unsigned major = about.stx_dev_major;
  unsigned minor = about.stx_dev_minor;
  std::ifstream mounts("/proc/self/mountinfo");
  for (std::string line; (about.stx_mask & STATX_MNT_ID) != 0 && std::getline(mounts, line);) {
    // https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html: 36 35 98:0 /mnt1 /mnt2 rw - ext3 /dev/root rw
    uint64_t id = 0;
    const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(' ', 3));
    if (fields.size() < 3 || !absl::SimpleAtoi(fields[0], &id) || id != about.stx_mnt_id) continue;
    const std::vector<std::string> device = absl::StrSplit(fields[2], ':');
    if (device.size() != 2 || !absl::SimpleAtoi(device[0], &major) || !absl::SimpleAtoi(device[1], &minor)) return "";
  }
  return absl::StrFormat("%02x:%02x:%d", major, minor, about.stx_ino);
}

// As the system's table of locks has it, for a message: "process 123 (flock)"; another machine's is not there.
std::string HolderOf(const std::string& path) {
  const std::string name_in_locks = NameInLocks(path);
  std::ifstream locks("/proc/locks");
  for (std::string line; std::getline(locks, line);) {
    // https://man7.org/linux/man-pages/man5/proc_locks.5.html: 1: FLOCK ADVISORY WRITE 123 08:01:4711 0 EOF
    const std::vector<std::string> fields = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (fields.size() < 6 || fields[1] != "FLOCK" || fields[5] != name_in_locks) continue;
    std::string name;
    std::ifstream comm(absl::StrCat("/proc/", fields[4], "/comm"));
    std::getline(comm, name);
    return absl::StrCat("process ", fields[4], name.empty() ? "" : absl::StrCat(" (", Printable(name, 64), ")"));
  }
  return "another process, perhaps of another machine";
}

// flock(2) itself could not be interrupted: a signal's handler is another thread's.
absl::StatusOr<FileDescriptor> AwaitLock(const std::string& path, const std::stop_token& stop,
                                         std::chrono::nanoseconds wait) {
  constexpr std::chrono::milliseconds kLook(20);
  constexpr std::chrono::seconds kSay(1);
  const TimePoint began = Now();
  bool said = false;
  while (true) {
    absl::StatusOr<FileDescriptor> file = LockFile(path);
    if (!absl::IsUnavailable(file.status())) return file;
    const auto waited = Now() - began;
    const auto holder = [&path] { return absl::StrCat(path, ": ", HolderOf(path), " holds this lock"); };
    if (stop.stop_requested()) return absl::CancelledError(absl::StrCat(holder(), "; stopped"));
    if (waited >= wait) return absl::DeadlineExceededError(holder());
    if (!said && waited >= kSay) {
      spdlog::warn("{}; waiting for it, for up to {}", holder(), FormatSeconds(wait));
      said = true;
    }
    std::this_thread::sleep_for(kLook);
  }
}

bool IsFolder(const std::string& path) {
  struct stat about = {};
  return stat(path.c_str(), &about) == 0 && S_ISDIR(about.st_mode);
}

// With those that it is in; each is on disk in its own.
absl::Status MakeFolders(const fs::path& path) {
  if (IsFolder(path)) return absl::OkStatus();
  const fs::path parent = path.has_parent_path() ? path.parent_path() : fs::path(".");
  if (parent != path) PS_RETURN_IF_ERROR(MakeFolders(parent));
  if (mkdir(path.c_str(), 0777) != 0 && !(errno == EEXIST && IsFolder(path))) {
    if (errno == EEXIST) return InvalidArgument(path.string(), ": it is not a folder");
    return FileError(path, "making the folder");
  }
  return SyncFolder(parent);
}

// Once this is on disk nothing that is left looks complete.
absl::Status RemoveManifest(const std::string& folder) {
  if (unlink(ManifestPath(folder).c_str()) == 0) return SyncFolder(folder);
  return errno == ENOENT ? absl::OkStatus() : FileError(ManifestPath(folder), "removing");
}

// What processes have left that were killed. Who writes one holds the lock; if somebody does, nothing is removed.
void RemoveTemporaryGenerations(const std::string& folder) {
  const absl::StatusOr<FileDescriptor> lock = LockFile(folder + "/generation.lock");
  if (!lock.ok()) return;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    if (at->path().filename().string().starts_with("generation.tmp-")) unlink(at->path().c_str());
  }
}

absl::Status RemoveCheckpoint(const std::string& folder) {
  // Another server of the job may be removing it, too.
  const absl::Status hidden = RemoveManifest(folder);
  if (!hidden.ok()) return IsFolder(folder) ? hidden : absl::OkStatus();
  std::error_code error;
  fs::remove_all(folder, error);
  if (!error || error == std::errc::no_such_file_or_directory) return absl::OkStatus();
  return Internal(folder, ": removing: ", error.message());
}

}  // namespace

absl::StatusOr<CheckpointDir> CheckpointDir::Open(const std::string& path) {
  // Without a slash at its end, which would give an empty last name.
  const fs::path folder = fs::path(path).lexically_normal() / "";
  const absl::Status made =
      path.empty() ? absl::InvalidArgumentError("the path is empty") : MakeFolders(folder.parent_path());
  if (!made.ok()) return InvalidArgument("--checkpoint_dir=", path, ": ", Message(made));
  PS_RETURN_IF_ERROR(CheckWritable("checkpoint_dir", path + "/generation"));
  RemoveTemporaryGenerations(path);
  return CheckpointDir(path);
}

absl::StatusOr<FileDescriptor> CheckpointDir::Lock(uint32_t shard) const {
  const std::string path = LockPath(shard);
  absl::StatusOr<FileDescriptor> file = LockFile(path);
  if (!absl::IsUnavailable(file.status())) return file;
  return FailedPrecondition("--checkpoint_dir=", path_, ": another process writes shard ", shard, " there; it holds ",
                            path);
}

bool CheckpointDir::WasLocked(uint32_t shard) const {
  struct stat about = {};
  return lstat(LockPath(shard).c_str(), &about) == 0;
}

absl::StatusOr<uint64_t> CheckpointDir::Generation() const {
  const std::string path = path_ + "/generation";
  const absl::StatusOr<CheckedJson> checked = ReadCheckedJson(path);
  if (absl::IsNotFound(checked.status())) return 0;
  if (!checked.ok()) return checked.status();
  JsonFields fields(checked->json);
  const uint64_t generation = fields.Number("generation");
  PS_RETURN_IF_ERROR(Annotate(fields.End(), path));
  return generation;
}

absl::Status CheckpointDir::RecordGeneration(uint64_t generation, const std::stop_token& stop,
                                             std::chrono::nanoseconds wait) const {
  PS_ASSIGN_OR_RETURN(const FileDescriptor lock, AwaitLock(path_ + "/generation.lock", stop, wait));
  const absl::StatusOr<uint64_t> recorded = Generation();
  if (recorded.ok() && *recorded >= generation) return absl::OkStatus();
  return WriteCheckedJson(path_ + "/generation", {{"generation", generation}}).status();
}

absl::StatusOr<uint64_t> CheckpointDir::BeginGeneration(uint64_t above, const std::stop_token& stop) const {
  const absl::StatusOr<FileDescriptor> lock = AwaitLock(path_ + "/generation.lock", stop, kLockTime);
  if (absl::IsDeadlineExceeded(lock.status())) {
    return absl::DeadlineExceededError(absl::StrCat(Message(lock.status()), ", and has held it for ",
                                                    FormatSeconds(kLockTime), "; end it, and start again"));
  }
  if (!lock.ok()) return lock.status();
  const absl::StatusOr<uint64_t> recorded = Generation();
  const uint64_t last = std::max(above, recorded.ok() ? *recorded : 0);
  if (last == std::numeric_limits<uint64_t>::max()) {
    return absl::OutOfRangeError(absl::StrCat(path_, ": there is no generation above ", last));
  }
  PS_RETURN_IF_ERROR(WriteCheckedJson(path_ + "/generation", {{"generation", last + 1}}).status());
  return last + 1;
}

absl::StatusOr<std::optional<CheckpointDir::NotFinite>> CheckpointDir::ReadNotFinite() const {
  const std::string path = NotFinitePath();
  const absl::StatusOr<CheckedJson> checked = ReadCheckedJson(path);
  if (absl::IsNotFound(checked.status())) return std::nullopt;
  if (!checked.ok()) return checked.status();
  JsonFields fields(checked->json);
  const NotFinite end = {.reason = fields.Text("reason"), .settings = fields.Texts("settings")};
  PS_RETURN_IF_ERROR(Annotate(fields.End(), path));
  return end;
}

absl::Status CheckpointDir::RecordNotFinite(const NotFinite& end) const {
  return WriteCheckedJson(NotFinitePath(), {{"reason", end.reason}, {"settings", end.settings}}).status();
}

absl::Status CheckpointDir::ForgetNotFinite() const {
  if (unlink(NotFinitePath().c_str()) == 0) return SyncFolder(path_);
  return errno == ENOENT ? absl::OkStatus() : FileError(NotFinitePath(), "removing");
}

absl::StatusOr<std::vector<CheckpointDir::Entry>> CheckpointDir::List() const {
  std::error_code error;
  std::vector<Entry> entries;
  for (fs::directory_iterator at(path_, error), end; !error && at != end; at.increment(error)) {
    const std::optional<uint64_t> number = NumberOf(at->path().filename().string());
    if (!number.has_value() || !IsFolder(PathOf(*number))) continue;
    struct stat about = {};
    const bool complete = lstat(ManifestPath(PathOf(*number)).c_str(), &about) == 0;
    entries.push_back({.number = *number, .path = PathOf(*number), .complete = complete});
  }
  if (error == std::errc::no_such_file_or_directory || error == std::errc::not_a_directory) {
    return absl::NotFoundError(path_ + ": there is no such folder");
  }
  if (error) return Internal(path_, ": reading the folder: ", error.message());
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.number > b.number; });
  return entries;
}

std::string CheckpointDir::PathOf(uint64_t number) const { return absl::StrCat(path_, "/", NameOf(number)); }

absl::Status CheckpointDir::Remove(uint64_t number) const {
  return IsFolder(PathOf(number)) ? RemoveCheckpoint(PathOf(number)) : absl::OkStatus();
}

std::string CheckpointDir::LockPath(uint32_t shard) const { return absl::StrCat(path_, "/shard-", shard, ".lock"); }

absl::Status CheckpointDir::Make(uint64_t number) const { return MakeFolders(PathOf(number)); }

std::optional<CheckpointDir::Origin> CheckpointDir::OriginOf(const std::string& checkpoint) {
  if (const absl::StatusOr<Manifest> manifest = ReadManifest(checkpoint); manifest.ok()) {
    return Origin{.generation = manifest->generation, .version = manifest->version()};
  }
  std::error_code error;
  for (fs::directory_iterator at(checkpoint, error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename().string();
    if (!name.starts_with("shard-") || !name.ends_with(".json")) continue;
    const absl::StatusOr<CheckedJson> record = ReadCheckedJson(at->path().string());
    if (!record.ok()) continue;
    const auto generation = record->json.find("generation"), version = record->json.find("version");
    if (generation == record->json.end() || !generation->is_number_unsigned()) continue;
    const bool has_version = version != record->json.end() && version->is_number_unsigned();
    return Origin{.generation = generation->get<uint64_t>(), .version = has_version ? version->get<uint64_t>() : 0};
  }
  return std::nullopt;
}

absl::Status CheckpointDir::RemoveThose(const MayRemove& are_old, const MayRemove& may_remove) const {
  PS_ASSIGN_OR_RETURN(const std::vector<Entry> entries, List());
  absl::Status result;
  for (const Entry& entry : entries) {
    if (are_old(entry) && (!may_remove || may_remove(entry))) result.Update(RemoveCheckpoint(entry.path));
  }
  return result;
}

absl::Status CheckpointDir::RemoveIncompleteBelow(uint64_t number, const MayRemove& may_remove) const {
  return RemoveThose([&](const Entry& entry) { return !entry.complete && entry.number < number; }, may_remove);
}

absl::Status CheckpointDir::Reap(size_t keep, const MayRemove& may_remove) const {
  Check(keep >= 1, "the newest complete checkpoint is kept");
  size_t complete = 0;  // Newer than this one.
  const auto is_superseded = [&](const Entry& entry) { return entry.complete ? complete++ >= keep : complete >= 1; };
  absl::Status result = RemoveThose(is_superseded, may_remove);
  result.Update(SyncFolder(path_));
  return result;
}

absl::Status CheckpointDir::ReapBelow(uint64_t number, const MayRemove& may_remove) const {
  absl::Status result = RemoveThose([&](const Entry& entry) { return entry.number < number; }, may_remove);
  result.Update(SyncFolder(path_));
  return result;
}

}  // namespace ps
