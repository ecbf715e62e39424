"""Constants of log, validators, group dump and stress test that other programs use.

`taskd.python.constants.constants` re-exports all of them.
"""

from taskd.ascend.documented import validators as _validators
from taskd.runtime import log as _log
from taskd.runtime import log_file as _log_file

LOG_DEFAULT_BACKUP_COUNT = _log.BACKUPS
LOG_DATE_FORMAT = _log.DATE_FORMAT
LOG_DEFAULT_MAX_BYTES = _log.FILE_LIMIT_BYTES
LOG_SIMPLE_FORMAT = _log.FORMAT
LOG_MAX_LINE_LENGTH = _log.MESSAGE_LIMIT
LOG_BAK_PRIVILEGE = _log_file.BACKUP_MODE
LOG_DIR_PRIVILEGE = _log_file.DIRECTORY_MODE
LOG_PRIVILEGE = _log_file.FILE_MODE
MAX_FILE_NUMS = _validators.MAX_ENTRIES
MAX_SIZE = _validators.MAX_FILE_SIZE
MAX_DEVICE_NUM = _validators.MAX_DEVICES
MAX_RANK_SIZE = _validators.MAX_RANK

MUSK_PRIVILEGE = 0o777
LOG_BACKUP_FORMAT = "%Y-%m-%dT%H-%M-%S.%f"
LOG_BACKUP_PATTERN = r"\d{4}-\d{2}-\d{2}T\d{2}-\d{2}-\d{2}\.\d{3}"
CHECK_STEP_PERIOD = 10

LIB_SO_PATH = "libs"
LIB_SO_NAME = "libtaskd.so"

TASKD_LOG_PATH = "TASKD_LOG_PATH"
TASKD_FILE_LOG_LEVEL = "TASKD_FILE_LOG_LEVEL"
TASKD_STD_LOG_LEVEL = "TASKD_STD_LOG_LEVEL"
TASKD_LOG_STDOUT = "TASKD_LOG_STDOUT"
LOG_DEFAULT_FILE_PATH = "./taskd_log/"
LOG_DEFAULT_FILE_NAME = "taskd.log"
LOG_DEFAULT_FILE = LOG_DEFAULT_FILE_PATH + LOG_DEFAULT_FILE_NAME

MIN_RANK_SIZE = 0
MIN_DEVICE_NUM = 1
MIN_SIZE = 0

PYTORCH = "pytorch"
MINDSPORE = "mindspore"

JOB_ID_KEY = "MINDX_TASK_ID"
GROUP_BASE_DIR_ENV = "GROUP_BASE_DIR"
DEFAULT_GROUP_DIR = "/user/cluster-info/profiling"
PROFILING_DIR_MODE = 0o755
GROUP_INFO_NAME = "parallel_group.json"
GROUP_INFO_KEY = "parallel_group_info"
GROUP_NAME_KEY = "group_name"
GROUP_RANK_KEY = "group_rank"
GLOBAL_RANKS_KEY = "global_ranks"
DEFAULT_GROUP = "default_group"

# Codes and limits in seconds of the tests of a device; `StressStatus` has their texts.
StressTestInit = -1
StressTestOK = 0
StressTestExecFail = 1
StressTestFindFault = 2
StressTestTimeout = 3
StressTestVolRecoverFail = 4
AicStressTestTimeout = 300
P2PStressTestTimeout = 600
